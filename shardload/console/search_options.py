"""Options of `shardload plan` for a search for layouts, and parsers for their values."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardload.console import completion
from shardload.console.options import dtype, new_file
from shardload.units import FLOATS, MIXED


class RematChoice(StrEnum):
    """Values of ``--remat``: what blocks of a model compute again in the backward pass."""

    AUTO = "auto"
    NONE = "none"
    MATMULS = "matmuls"
    FULL = "full"


def planned_dtype(text: str) -> str:
    """Parse ``--dtype`` of a plan, which may also be a policy of Keras: float32 weights, and products in 16 bits."""
    return dtype(text, known=(*FLOATS, *MIXED))


def optimizer(text: str) -> str:
    """Parse ``--train``."""
    if not text:
        raise typer.BadParameter("expected the name of an optimizer, such as adamw.")
    return text


def searched_mesh(mesh: str | None, devices: int | None, batch: int | None) -> str | None:
    """Return ``--mesh``, or for ``auto`` one mesh of so many devices: the search tries all of them."""
    if mesh != "auto":
        if devices is not None:
            raise typer.BadParameter("It is for --mesh auto.", param_hint="--devices")
        return mesh
    if devices is None:
        raise typer.BadParameter("auto tries all meshes of N devices: add --devices N.", param_hint="--mesh")
    if batch is None:
        raise typer.BadParameter("auto compares meshes with the same batch: add --batch N.", param_hint="--mesh")
    return f"1x{devices}"


class SequenceParallelChoice(StrEnum):
    """Values of ``--sequence-parallel``: whether activations are split along their sequence."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    @property
    def for_search(self) -> Literal["auto"] | bool:
        """The value as the argument of a search."""
        return "auto" if self is SequenceParallelChoice.AUTO else self is SequenceParallelChoice.ON


TrainOption = Annotated[
    str | None,
    typer.Option(
        "--train",
        metavar="OPTIMIZER",
        parser=optimizer,
        help="Plan a training step with this optimizer: adamw, or rekls. Inference by default.",
        autocompletion=lambda: completion.OPTIMIZERS,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        min=1,
        help="Rows of a step, on all devices together; by default 8 for each position of the batch axis.",
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--sequence", metavar="N", min=1, help="Tokens per row, if the model does not fix them; 512 by default."
    ),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="N",
        min=1,
        help="With --mesh auto: search on every mesh of N devices, batch x model, and take the fastest.",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        min=1,
        help="Divide the batch into N parts, one after the other, and update the weights after the last: gradients are "
        "accumulated (gradient_accumulation_steps of the optimizer).",
    ),
]
RematOption = Annotated[
    RematChoice,
    typer.Option(
        "--remat",
        help="What blocks compute again in the backward pass instead of keeping it: nothing, all but products with "
        "weights, everything, or what is fastest within --device-memory.",
    ),
]
SequenceParallelOption = Annotated[
    SequenceParallelChoice,
    typer.Option(
        "--sequence-parallel",
        help="Whether the model axis splits activations along their sequence between products with weights: on, off, "
        "or if a step does not fit within --device-memory otherwise.",
    ),
]
FusedAttentionOption = Annotated[
    bool,
    typer.Option(
        "--fused-attention",
        help="Count attention as one kernel that stores no scores, as on a GPU, where a search counts them otherwise.",
    ),
]
PlanDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        parser=planned_dtype,
        help="Dtype of the weights: bfloat16, float16 or float32; or mixed_bfloat16 or mixed_float16, for float32 "
        "weights and products in 16 bits. The checkpoint's own by default.",
        autocompletion=lambda: (*FLOATS, *MIXED),
    ),
]
CompileStepOption = Annotated[
    bool, typer.Option("--compile", help="Compile the planned step, without weights, to check memory and collectives.")
]
SavePlanOption = Annotated[
    Path | None,
    typer.Option(
        "--save-plan",
        metavar="FILE.json",
        callback=new_file(".json"),
        help="Write the plan, for `shardload load --layout FILE.json`.",
    ),
]
SvgOption = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        metavar="FILE.svg",
        callback=new_file(".svg"),
        help="Draw memory per device, and what is split where, as SVG.",
    ),
]
