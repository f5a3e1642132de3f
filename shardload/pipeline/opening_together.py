"""Open a checkpoint that several processes load: process 0 reads the headers, the others get what it read.

Without this, 512 hosts would read the headers of 191 files each before a load of 405 B parameters. The others compare
the sizes of the files; contents are compared before the first byte is read (`shardload.pipeline.source_facts`).

The tokenizer in a bucket is handed out with the headers if the model is built: KerasHub opens it on this machine.
"""

from __future__ import annotations

from collections.abc import Callable

from shardload.errors import DisagreementError, ShardloadError, TransferError
from shardload.loaders import spec_of
from shardload.processes.joint_call import Call
from shardload.resolve.opening import OpenedSource
from shardload.stores.header_reads import Replay, noting, replaying, root_of
from shardload.units import exact_bytes


def open_together(call: Call, opener: Callable[[], OpenedSource], *, builds: bool = False) -> OpenedSource:
    """Open a source on all processes of a call by ``opener``; only process 0 reads its headers, where it can.

    With ``builds``, a model is built from what is opened: process 0 also reads the tokenizer and other small files.
    """
    if call.is_alone:
        return opener()
    mine: list[OpenedSource] = []

    def read() -> bytes | None:
        with noting() as noted:
            mine.append(opener())
            _copy_small_files(mine[0], builds=builds)
        return noted.pack(mine[0].manifest.location)

    packed = call.hand_out(read, "the headers")
    if mine:
        return mine[0]
    if packed is None:  # too much to be kept in memory, or a place that each process must ask for itself
        return opener()
    wrong: ShardloadError | None = None
    is_same = False
    with replaying(packed) as replay:
        try:
            opened = opener()
        except ShardloadError as error:
            wrong = error
        else:
            if is_same := replay.is_of(opened.manifest.location):
                _copy_small_files(opened, builds=builds)
    if wrong is not None:
        opener()  # raises what is wrong with the files of this process
        # Not `from wrong`: it may be damage, of which the other processes know nothing.
        raise _disagreement(f"By the headers of process 0, those of this one are wrong: {wrong}")
    if not is_same:  # another step, or a folder of another name
        return opener()
    _check_sizes(opened, replay)
    return opened


def _copy_small_files(source: OpenedSource, *, builds: bool) -> None:
    """Copy the small files of a checkpoint at an address to this machine, where KerasHub opens them later."""
    if builds and spec_of(source.manifest).described_by in ("keras-hub", "hugging-face"):
        source.manifest.location.local_folder()


def _check_sizes(opened: OpenedSource, replay: Replay) -> None:
    """Raise if a file of this process has another size than that of process 0, whose headers are used."""
    root, _ = root_of(opened.manifest.location)
    for path in opened.manifest.files:
        wanted = replay.size_of(path, root)
        try:
            found = path.identity().size
        except TransferError:
            found = None
        if wanted is not None and wanted != found:
            raise _disagreement(
                f"The size of {path}: process 0 has {exact_bytes(wanted)}, this one has "
                f"{'no such file' if found is None else exact_bytes(found)}"
            )


def _disagreement(what: str) -> DisagreementError:
    return DisagreementError(
        f"Cannot make this call together: the processes disagree about the source. {what}. Copy it again where it lies "
        "in several places"
    )
