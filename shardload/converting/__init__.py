"""Write a checkpoint, or a live model, in another format: `convert` and `save_as`.

checkpoint ─► abstract model ─► value of each variable: a view of a stored tensor      `source.py`
live model ───────────────────► value of each variable: an array on devices            `live_source.py`
variable ─► a view of a tensor of the target           `targets.py`
make every file of the target, without its values                                      `writers/`
copy each value, block by block; a conversion notes it in a journal  `conversion.py`, `strided_copy.py`
open the result's headers as its readers do                                            `checking.py`
flush ─► one rename                                                                    `publishing.py`
"""

from shardload.converting.array_saving import save_arrays
from shardload.converting.conversion import convert
from shardload.converting.plans import ConvertReport
from shardload.converting.saving import SAVE_TARGETS, SaveTarget, save_as
from shardload.converting.targets import CONVERT_HOST_MEMORY, TARGETS, Target

__all__ = [
    "CONVERT_HOST_MEMORY",
    "SAVE_TARGETS",
    "TARGETS",
    "ConvertReport",
    "SaveTarget",
    "Target",
    "convert",
    "save_arrays",
    "save_as",
]
