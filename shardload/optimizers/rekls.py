"""The Keras optimizer `REKLS`: its state in Keras variables, a step as one traced function, and the checks before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardload.errors import UsageError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.joint_optimizer import JointOptimizer, in_place_of
from shardload.keras_bridge.variables import is_variable, stored_dtype
from shardload.optimizers import rekls_setup
from shardload.optimizers.dealing import ALONE_TIMES, EVERYWHERE_TIMES, Batch, Sized, batched, split_axes
from shardload.optimizers.joint_update import (
    AdamwState,
    Counters,
    Counts,
    Gradients,
    JointPlan,
    Matrix,
    MatrixState,
    WholePlan,
    WholeState,
    whole_step,
)
from shardload.optimizers.matrices import ADAMW_FOR, MAX_DIMENSION, MatrixView
from shardload.optimizers.rekls_math import Eigenpairs, Moments, Sides
from shardload.sharding.layout import Layout


@keras.saving.register_keras_serializable("shardload")
class REKLS(JointOptimizer):
    """Adam in the eigenbasis of Kronecker factors, with state that is sharded like the model.

    A SOAP variant with the factors of KL-Shampoo and a decomposition in every step; after NVIDIA Emerging-Optimizers,
    pull request 175, called the original below. Variables with two or more dims are updated as matrices. All others
    get AdamW, and so do embeddings, biases and variables that are too large on both sides. State is float32 and split
    over the mesh axes that split its variable.

    Each matrix W (m x n) has two factors, L (m x m) and R (n x n): moving averages of products of its gradients. They
    are decomposed into eigenvectors, and Adam runs in the coordinates of these.

    Examples:
        ```python
        model.compile(shardload.optimizers.REKLS(learning_rate=1e-3), "mse")
        model.fit(x, y)
        ```

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`, or a callable.
        beta_1: Decay rate of the first moment.
        beta_2: Decay rate of the second moment.
        factor_beta: Decay rate of the factors L and R.
        epsilon: Added to the root of the second moment; also the smallest eigenvalue to divide gradients by.
        weight_decay: Strength of the weight decay; ``None`` or 0 turns it off.
        weight_decay_method: What is subtracted from W: ``"decoupled"`` (lr · wd · W), ``"independent"`` (wd · W) or
            ``"palm"`` (lr² · wd · W). Or wd · W is added to the gradient: ``"l2"`` after the factors are updated,
            ``"l2_before_factors"`` before, as the tensor-parallel version of the original does.
        precondition_frequency: Number of steps from one decomposition to the next.
        decomposition: ``"eigh"``: exact. ``"qr"``: one step of QR iteration from the eigenvectors of the step before.
        decompositions: ``"dealt"``: each decomposition runs on one device of the mesh, and all devices get its result.
            If at least as many matrices as devices have the same shape, dtype and layout, and are split over all
            devices, all other work on a matrix runs on one device, too. ``"repeated"``: every device decomposes all
            factors.
        max_dimension: Longest side of a matrix that has a factor. For a longer side, the identity takes its place.
        factor_dtype: Dtype in which L and R are stored: ``"float32"`` or ``"bfloat16"``.
        skip_first_update: Use the first nonzero gradient of each matrix only to find its eigenbases. The matrix moves,
            and its weight decay begins, in the next step. In exact arithmetic, a gradient is diagonal in coordinates of
            its own eigenbases. Elements off the diagonal are rounding noise, which Adam would scale to full steps.
        init_factor: Eigenvalues before the first step. ``"rms"`` is the root mean square of each matrix's first
            nonzero gradient. With 0, as in the original, the first gradient is divided by ``epsilon`` and dominates the
            eigenvectors for 100 steps and more, see ``docs/explanation/rekls-defaults.md``.
        relative_epsilon: Smallest eigenvalue that a gradient is divided by, as a share of the mean eigenvalue of the
            factor. The original has 0.
        limit_updates: Clip the elements of Adam's update, in coordinates of the eigenbases and before the learning
            rate, to the largest value that Adam can reach with these betas: 1.165 by default. When the eigenbases
            change, the second moment keeps its old values, which can be too small in the new coordinates. Without a
            limit, steps can be hundreds of learning rates long.
        rank_tolerance: W moves only along eigenvectors whose eigenvalue is at least this share of the largest one, of
            both factors. Along the others, gradients are rounding noise, which Adam would scale to full steps. With
            ``factor_dtype="bfloat16"``, at least 2⁻⁸ is used, its precision. With 0, as in the original, W moves in all
            directions, even a row that never has a gradient. ``docs/explanation/rekls-weights-without-a-gradient.md``
            says what it costs.
        adamw_for: Variables that get AdamW regardless of shape: regular expressions for their paths, or a function that
            returns True for such a variable.
        adamw_ratio: Multiplies the learning rate of variables with AdamW.
        row_dims: The dims that form the rows of a matrix, by regular expressions for paths, where the rule for shapes
            is wrong (see `shardload.optimizers.matrices`).
        whole_bytes: Limit for the state that is gathered whole on a device at a time, in bytes, or as text like
            ``"4GiB"``. Matrices are updated in batches whose state is at most this large, or one by one if a single
            one is larger. An update needs about twice as much memory on each device. If as many matrices as devices
            have the same shape, dtype and layout, and are split over all devices, each device updates one alone. In
            other batches, devices share only the decompositions, and some wait if there are fewer factors than devices.
        uneven: For a factor whose length the devices do not divide: raise an ``"error"``, or ``"replicate"`` it.
        **options: As for every Keras optimizer: ``clipnorm``, ``global_clipnorm``, ``use_ema``, ``name`` and so on.

    Raises:
        UsageError: When an argument is not one of its choices, or out of range.
        BackendError: When Keras does not run on JAX.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.95,
        factor_beta: float = 0.95,
        epsilon: float = 1e-8,
        weight_decay: float | None = 0.01,
        weight_decay_method: str = "decoupled",
        precondition_frequency: int = 1,
        decomposition: str = "eigh",
        decompositions: str = "dealt",
        max_dimension: int = MAX_DIMENSION,
        factor_dtype: str = "float32",
        skip_first_update: bool = True,
        init_factor: float | str = rekls_setup.RMS,
        relative_epsilon: float = 0.01,
        limit_updates: bool = True,
        rank_tolerance: float = 1e-5,
        adamw_for: rekls_setup.AdamwFor = ADAMW_FOR,
        adamw_ratio: float = 1.0,
        row_dims: Mapping[str, Sequence[int]] | None = None,
        whole_bytes: int | str = rekls_setup.WHOLE_BYTES,
        uneven: str = "error",
        **options: Any,
    ) -> None:
        rekls_setup.check_hyperparameter("weight_decay", 0 if weight_decay is None else weight_decay)
        super().__init__(learning_rate=rekls_setup.check_rate(learning_rate), weight_decay=weight_decay, **options)
        self.options = rekls_setup.Options(
            beta_1=beta_1,
            beta_2=beta_2,
            factor_beta=factor_beta,
            epsilon=epsilon,
            weight_decay_method=weight_decay_method,
            precondition_frequency=precondition_frequency,
            decomposition=decomposition,
            decompositions=decompositions,
            max_dimension=max_dimension,
            factor_dtype=rekls_setup.canonical_dtype(factor_dtype),
            skip_first_update=skip_first_update,
            init_factor=init_factor,
            relative_epsilon=relative_epsilon,
            limit_updates=limit_updates,
            rank_tolerance=rank_tolerance,
            adamw_for=adamw_for,
            adamw_ratio=adamw_ratio,
            row_dims={} if row_dims is None else row_dims,
            whole_bytes=rekls_setup.check_bytes("whole_bytes", whole_bytes),
            uneven=uneven,
        )

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the state of all variables, each split over the mesh of its variable.

        Raises:
            UsageError: When a variable does not contain real floating-point numbers, or has no elements; or when a
                pattern in ``adamw_for`` or ``row_dims`` matches no variable.
            LayoutError: When devices do not divide the length of a factor, unless ``uneven="replicate"``.
        """
        if self.built:
            return
        variables = list(variables)
        # Whatever can raise comes first, generators included: a refused build leaves no state behind.
        for variable in variables:
            rekls_setup.check_variable(variable)
        self.options.rules.check_patterns([variable.path for variable in variables])
        views = tuple(self._view(variable) for variable in variables)
        planned = [list(rekls_setup.new_slots(v, view, self.options)) for v, view in zip(variables, views, strict=True)]
        super().build(variables)
        self.views = views
        # Lists with one entry per variable, as Keras' own optimizers have them: `slots_in` finds slots by that.
        found: dict[str, list[Variable | None]] = {slot: [None] * len(variables) for slot in rekls_setup.SLOTS}
        for place, (variable, slots) in enumerate(zip(variables, planned, strict=True)):
            for new in slots:
                found[new.slot][place] = self.add_state(
                    variable,
                    rekls_setup.SLOTS[new.slot],
                    shape=new.shape,
                    dtype=new.dtype,
                    initializer=self.start_of_slot(new.slot),
                    sharding=new.sharding,
                )
        for slot, held in found.items():
            setattr(self, slot, held)
        # Keras' `iterations` also counts skipped steps, but the first update must be number 1, where β̂ is 0.
        for name in ("steps", "skipped_steps", "kept_eigenpairs"):
            setattr(self, name, self.add_variable((), dtype="int32", name=name))

    def start_of_slot(self, slot: str) -> Any:
        """Return the Keras initializer of the attribute ``slot``; a restore asks for it if a step lacks this state."""
        return rekls_setup.start_of_slot(slot, self.options)

    def _view(self, variable: Variable) -> MatrixView | None:
        chosen = self.options.adamw_for
        if callable(chosen):
            answer = chosen(variable)
            # A function that forgets to return answers None, which must not pass for False.
            if not isinstance(answer, bool | np.bool_):
                raise UsageError(
                    f"Cannot build {self.name!r} with adamw_for={chosen!r:.60}: for {variable.path!r} it returned "
                    f"{answer!r:.60}, expected True (AdamW) or False"
                )
            if answer:
                return None
        return self.options.rules.view(variable.path, tuple(variable.shape))

    def update_all(self, gradients: Sequence[Any], variables: Sequence[Variable], learning_rate: Any) -> None:
        """Update all variables that have gradients, or none if a gradient is not finite."""
        found = [(g, v, self.views[self.position(v)]) for g, v in zip(gradients, variables, strict=True)]
        matrices = [(g, v, view) for g, v, view in found if view is not None]
        others = [(g, v) for g, v, view in found if view is None]
        held = WholeState(
            [self._matrix_state(v) for _, v, _ in matrices],
            [AdamwState(v, self._moments(v)) for _, v in others],
            Counters(self.steps, self.skipped_steps, self.kept_eigenpairs),
        )
        plan = self._plan(held, [view for *_, view in matrices])
        # Pytrees of one structure, with variables, their values before, and after as leaves.
        given = Gradients([in_place_of(g, v) for g, v, _ in matrices], [in_place_of(g, v) for g, v in others])
        before = jax.tree.map(lambda variable: variable.value, held, is_leaf=is_variable)
        after = whole_step(plan, before, given, jnp.asarray(learning_rate), jnp.asarray(self.is_due()))
        jax.tree.map(lambda variable, value: variable.assign(value), held, after, is_leaf=is_variable)

    @property
    def needs_even_state(self) -> bool:
        """Whether a factor that the devices cannot split evenly is an error, instead of being replicated on all."""
        return self.options.uneven == "error"

    @property
    def fixed_dtype_state(self) -> list[Variable]:
        """State that keeps its dtype even if the weights have another: moments, factors and eigenpairs."""
        return [v for slot in rekls_setup.SLOTS for v in getattr(self, slot, ()) if v is not None]

    @property
    def update_bytes(self) -> int:
        """Most bytes of temporary arrays on each device during an update, on any mesh (measured on CPU)."""
        places = [place for place, view in enumerate(self.views) if view is not None]
        sizes = [self._whole_bytes(place) for place in places]
        # Which matrices are dealt out depends on the mesh: at most those that share their view with another one.
        views = Counter(self.views)
        alone = [size for place, size in zip(places, sizes, strict=True) if views[self.views[place]] > 1]
        everywhere = [sum(sizes[i] for i in batch.places) for batch in self._batches(places, None)]
        return max(EVERYWHERE_TIMES * max(everywhere, default=0), ALONE_TIMES * max(alone, default=0))

    def _batches(self, places: Sequence[int], mesh: Mesh | None) -> tuple[Batch, ...]:
        """Return which weight matrices are updated together, as batches.

        ``places`` has the positions of the matrices among all trained variables. A batch, in its own ``places``, has
        positions in this argument: 0 is the matrix ``places[0]``.
        """
        devices = mesh.size if mesh is not None and self.options.decompositions == "dealt" else 1
        # An axis of one device splits nothing, so specs need not name it.
        axes = set() if mesh is None else {axis for axis, size in mesh.shape.items() if size > 1}
        sized = []
        for place in places:
            if (view := self.views[place]) is not None:
                variable, specs = self.trained[place], self._specs(place)
                is_split = mesh is not None and all(axes <= split_axes(spec) for spec in specs)
                # All that shapes the traced update of a matrix: dealt-out matrices of one kind run as one program.
                kind = view, stored_dtype(variable).name, specs, self.is_decayed(variable)
                sized.append(Sized(view.sides, self._whole_bytes(place), is_split, kind))
        return batched(sized, self.options.whole_bytes, devices)

    def _specs(self, place: int) -> tuple[PartitionSpec, ...]:
        state = (getattr(self, slot)[place] for slot in rekls_setup.SLOTS)
        return tuple(rekls_setup.partition_spec_of(v) for v in (self.trained[place], *state) if v is not None)

    def _whole_bytes(self, place: int) -> int:
        state = (getattr(self, slot)[place] for slot in rekls_setup.SLOTS)
        return sum(math.prod(v.shape) * stored_dtype(v).itemsize for v in state if v is not None)

    def state_layouts(self, layout_of: Callable[[Variable], Layout | None]) -> dict[int, Layout]:
        """Return the layouts of factors and eigenpairs, by ``id`` of each; ``layout_of`` returns that of a weight."""
        found: dict[int, Layout] = {}
        for place, variable in enumerate(self.trained):
            if (layout := layout_of(variable)) is not None:
                state = [getattr(self, slot)[place] for slot in rekls_setup.FACTOR_SLOTS]
                found |= {id(v): rekls_setup.along_first(layout, tuple(v.shape)) for v in state if v is not None}
        return found

    def _matrix_state(self, variable: Variable) -> MatrixState:
        place = self.position(variable)
        state = {slot: getattr(self, slot)[place] for slot in rekls_setup.SLOTS}
        pairs = [
            None if state[f"{side}_values"] is None else Eigenpairs(state[f"{side}_values"], state[f"{side}_vectors"])
            for side in ("left", "right")
        ]
        factors = Sides(state["left_factors"], state["right_factors"])
        return MatrixState(variable, self._moments(variable), factors, Sides(*pairs))

    def _moments(self, variable: Variable) -> Moments:
        place = self.position(variable)
        return Moments(self.momentums[place], self.velocities[place])

    def _plan(self, held: WholeState, views: Sequence[MatrixView]) -> WholePlan:
        mesh = rekls_setup.common_mesh(self, jax.tree.leaves((held.matrices, held.others), is_leaf=is_variable))
        matrices = []
        for state, view in zip(held.matrices, views, strict=True):
            # On one device, empty specs leave nothing to gather or to slice.
            specs = jax.tree.map(
                lambda variable: PartitionSpec() if mesh is None else rekls_setup.partition_spec_of(variable),
                state,
                is_leaf=is_variable,
            )
            matrices.append(Matrix(view, specs, self.is_decayed(state.weight)))
        joint = JointPlan(
            tuple(matrices),
            self.options.settings(self.weight_decay),
            self._batches([self.position(state.weight) for state in held.matrices], mesh),
            mesh,
            frequency=self.options.precondition_frequency,
            decomposition=self.options.decomposition,
            dealt=self.options.decompositions == "dealt",
        )
        decays = tuple(self.is_decayed(state.weight) for state in held.others)
        return WholePlan(joint, decays, self.options.adamw_ratio)

    def counts(self) -> Counts:
        """Return how many steps changed the weights, and what was skipped because of NaN or infinity.

        Raises:
            UsageError: Before the optimizer is built, which the first step does.
        """
        if not self.built:
            raise UsageError(f"Cannot count the steps of {self.name!r}: it is not built. Train first, or call build()")
        return Counts(int(self.steps.value), int(self.skipped_steps.value), int(self.kept_eigenpairs.value))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for `from_config` and for saved models."""
        config: dict[str, Any] = super().get_config()
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        # JSON requires Python's numbers, not NumPy's.
        config |= {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}
        if callable(self.options.adamw_for):
            config["adamw_for"] = keras.saving.serialize_keras_object(self.options.adamw_for)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> REKLS:
        """Create an optimizer from a `get_config` dict; a function in ``adamw_for`` must be registered with Keras."""
        config = dict(config)
        if isinstance(config.get("adamw_for"), dict):
            config["adamw_for"] = keras.saving.deserialize_keras_object(
                config["adamw_for"], custom_objects=custom_objects
            )
        found: REKLS = super().from_config(config, custom_objects)
        return found


TpRekls = REKLS
"""Another name of `REKLS`: in NVIDIA's original, the tensor-parallel version, which `REKLS` includes."""
