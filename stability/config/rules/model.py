"""Rules of a model: its parts fit each other and the objective.

The parts are mechanism, positions, head, linear maps and cross mechanism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stability.config.parts import Part, contexts_of, num_context_of
from stability.registry import Registry

if TYPE_CHECKING:
    from stability.config.run import AbstractRecipe, RunSpec


def data_fit_objective(recipe: AbstractRecipe) -> None:
    """Refuse data of another kind than the objective's; the message lists fitting choices."""
    sources, objectives = Registry("data"), Registry("objectives")
    data, objective = recipe.data.name, recipe.objective.name
    needed, given = objectives.load(objective).corpus_kind, sources.load(data).corpus.kind
    if needed != given:
        fitting = [name for name in sources.names() if sources.load(name).corpus.kind == needed]
        others = [name for name in objectives.names() if objectives.load(name).corpus_kind == given]
        raise ValueError(
            f"objective={objective} reads {needed}, and data={data} gives {given}; objective={objective} takes "
            f"data={' or '.join(fitting) or 'none'}, data={data} takes objective={' or '.join(others) or 'none'}"
        )


def positions_are_added_once(recipe: AbstractRecipe) -> None:
    adds = Registry("positions").load(recipe.position.name).adds
    if adds and Registry("objectives").load(recipe.objective.name).embeds_positions:
        raise ValueError(
            f"objective={recipe.objective.name} adds a learned vector of each position itself, and so does "
            f"position={recipe.position.name}; choose position=none for it alone, or position=rope"
        )


def head_can_be_tied(recipe: AbstractRecipe) -> None:
    """Refuse a tied or factorised embedding unless the embedded tokens are also predicted.

    A tied head that starts at zero is refused, too.
    """
    objective, size = Registry("objectives").load(recipe.objective.name), recipe.model
    factorised = size.embedding_width is not None
    if (size.tied or factorised) and not objective.embeds_tokens:
        setting = f"embedding_width={size.embedding_width}" if factorised else "tied=true"
        raise ValueError(
            f"model.{setting} needs an objective that predicts the tokens that it embeds, and "
            f"objective={recipe.objective.name} does not; choose mlm or ar"
        )
    if size.tied and objective(recipe.objective.settings, objective.any_format(2)).condition is not None:
        raise ValueError(
            f"model.tied=true, but with objective={recipe.objective.name} the head starts at zero, and the embedding "
            "must not; choose mlm or ar"
        )


def head_exists(recipe: AbstractRecipe) -> None:
    """Refuse settings of a head that the model of this objective does not have."""
    size = recipe.model
    if Registry("objectives").load(recipe.objective.name).has_head:
        return
    given = {"tied=true": size.tied, "head_bias=false": not size.head_bias, "logit_softcap": size.logit_softcap}
    if changed := next((name for name, is_given in given.items() if is_given), None):
        raise ValueError(
            f"model.{changed} is of a model's head, and objective={recipe.objective.name} has none: its outputs "
            "are the pooled states themselves; leave it out"
        )


def embedding_can_be_convolved(recipe: AbstractRecipe) -> None:
    """Refuse a convolution of anything but embedded tokens, and an even one that reads both sides."""
    size = recipe.model.embedding_conv
    if size is None:
        return
    objective = Registry("objectives").load(recipe.objective.name)
    if not objective.embeds_tokens:
        raise ValueError(
            f"model.embedding_conv={size} reads neighbouring tokens, and objective={recipe.objective.name} embeds no "
            "plain sequence of tokens; choose mlm or ar"
        )
    if objective.direction != "causal" and size % 2 == 0:
        raise ValueError(
            f"model.embedding_conv={size}: objective={recipe.objective.name} reads both sides, so the number of "
            f"positions must be odd; give {size + 1}"
        )


def logits_can_be_capped(recipe: AbstractRecipe) -> None:
    """Refuse capped logits beside a loss that never has the model's logits."""
    settings: Any = recipe.objective.settings
    if recipe.model.logit_softcap is None:
        return
    for key, without in (("loss_chunk", None), ("impl", "reference")):
        value = getattr(settings, key, without)
        if value != without:
            raise ValueError(
                f"model.logit_softcap={recipe.model.logit_softcap:g} caps the model's logits, and objective.{key}="
                f"{value} does not make them; leave one of the two out"
            )


def mechanism_is_trainable(run: RunSpec) -> None:
    require_trainable("mechanism", run.mechanism)


def depth_fits_pattern(run: RunSpec) -> None:
    needed = Registry("mechanisms").load(run.mechanism.name).fewest_layers(run.mechanism.settings)
    if needed > run.model.layers:
        depth = f"{run.model.layers} layer{'' if run.model.layers == 1 else 's'}"
        raise ValueError(
            f"mechanism.{run.mechanism.name}.pattern has {needed} entries for {depth}; give model.layers={needed} "
            f"or more, a pattern of at most {run.model.layers}, or mechanisms without one, e.g. mechanism=[sa,sc]"
        )


def direction_fits(run: RunSpec) -> None:
    registry, objectives = Registry("mechanisms"), Registry("objectives")
    objective, directions = (
        objectives.load(run.objective.name),
        registry.load(run.mechanism.name).supported_directions(run.mechanism.settings),
    )
    direction = objective.direction
    if direction in directions:
        return
    choices = {name: registry.load(name) for name in registry.names(cross=False, trainable=True)}
    fitting = [name for name, each in choices.items() if direction in each.supported_directions(each.Config())]
    names = f"objective={run.objective.name} needs a {direction} mechanism and {run.mechanism.name} is none"
    others = [name for name in objectives.names() if _is_alternative(objectives.load(name), objective, directions)]
    other = f"; {run.mechanism.name} goes with objective={' or '.join(others)}" if others else ""
    raise ValueError(f"{names}; these are: {', '.join(fitting)}, and mix of these{other}")


def _is_alternative(other: Any, objective: Any, directions: frozenset[str]) -> bool:
    """Return whether another objective reads the same data and fits a mechanism's directions."""
    return other.corpus_kind == objective.corpus_kind and other.direction in directions


def edges_are_given(run: RunSpec) -> None:
    if Registry("mechanisms").load(run.mechanism.name).needs_edges(run.mechanism.settings):
        raise ValueError(
            f"mechanism={run.mechanism.name} with graph=given takes edges= with every batch, and "
            f"data={run.data.name} has none; choose another graph"
        )


def decays_are_read(run: RunSpec) -> None:
    """Refuse positions that are decays of the logits beside mechanisms without such logits."""
    registry = Registry("mechanisms")
    if Registry("positions").load(run.position.name).decays(run.position.settings) is None:
        return
    given = [("mechanism", run.mechanism), *([] if run.cross is None else [("cross", run.cross)])]
    for key, item in given:
        exported = registry.load(item.name)
        if exported.cross or not exported.reads_decays(item.settings):
            raise ValueError(
                f"position={run.position.name} decays the logits of mechanism=sa (and mix of it), and "
                f"{key}={item.name} does not read the decays; choose position=rope"
            )


def lengths_and_heads_fit(run: RunSpec) -> None:
    mechanism = Registry("mechanisms").load(run.mechanism.name)
    mechanism.check_positions(run.mechanism.settings, run.model.positions)
    mechanism.check_heads(run.mechanism.settings, run.model.heads)


def linear_maps_are_called(run: RunSpec) -> None:
    """Refuse a non-affine linear map if a mechanism reads its maps' weights directly."""
    registry = Registry("mechanisms")
    if Registry("linears").load(run.linear.name).is_affine:
        return
    for key, item in (("mechanism", run.mechanism), ("cross", run.cross)):
        if item is not None and not registry.load(item.name).calls_linears(item.settings):
            raise ValueError(
                f"linear={run.linear.name} would have no effect: {key}={item.name} multiplies with the weights itself "
                "and does not call its linear maps; choose another mechanism, or linear=dense"
            )


def cross_has_context(run: RunSpec) -> None:
    """Refuse a context without a cross mechanism, and an untrainable one or one without context."""
    num_context, contexts = num_context_of(run.objective), contexts_of(run.objective)
    if run.cross is None:
        if num_context:
            raise ValueError(
                f"objective.context={num_context} is read by a cross mechanism only; add cross=auto, or "
                "objective.context=0"
            )
        if contexts:
            raise ValueError(
                f"objective.contexts=[{','.join(contexts)}] is read by cross mechanisms only; add cross=auto, or "
                "objective.contexts=[]"
            )
        return
    if not num_context and not contexts:
        needed = f"cross={run.cross.name} needs a context, and objective={run.objective.name} has none"
        if "contexts" in type(run.objective.settings).model_fields:
            raise ValueError(f"{needed} with objective.contexts=[]; add cross=none")
        raise ValueError(f"{needed}; objective=mlm objective.context=64 gives the 64 tokens before each sequence")
    require_trainable("cross", run.cross)


def require_trainable(key: str, item: Part) -> None:
    """Refuse a mechanism that is untrainable or contains one.

    ``key`` is the mechanism's key in the message, e.g. ``mechanism``.

    Raises:
        ValueError: one line with the trainable choices.
    """
    registry = Registry("mechanisms")
    mechanism = registry.load(item.name)
    if found := mechanism.untrained(item.settings):
        name = found[0].__module__.rsplit(".", 1)[-1]
        owner = f"{key}={item.name}" + (f" contains {name}, which" if name != item.name else "")
        choices = ", ".join(registry.names(cross=mechanism.cross, trainable=True))
        raise ValueError(f"{owner} cannot be trained: it is for {found[0].used_for}; these can: {choices}")


def parametrization_scales_the_run(run: RunSpec) -> None:
    """Refuse a parametrization without a base width, and parts that it has no factors for."""
    part = run.parametrization
    if part.name == "standard":
        return
    name, base = part.name, getattr(part.settings, "base_width", None)
    if base is None:
        raise ValueError(f"parametrization.{name}.base_width: a value is missing; a run has its base width as a number")
    head = run.model.width // run.model.heads
    if base % head:
        raise ValueError(
            f"parametrization.{name}.base_width={base}: must be a multiple of the heads' width, {head}, which is the "
            "same at every size; give model.head_width"
        )
    optimizers = Registry("optimizers")
    if optimizers.load(run.optimizer.name).update_family is None:
        known = [each for each in optimizers.names() if optimizers.load(each).update_family is not None]
        raise ValueError(
            f"optimizer={run.optimizer.name} has no factors in parametrization={name}; choose one of {', '.join(known)}"
        )
    if run.model.tied and name == "layerwise":
        raise ValueError(
            "parametrization=layerwise has other rates for the head than for the embedding, and with model.tied=true "
            "they are one matrix; choose mup, or model.tied=false"
        )
    if run.model.tied and getattr(part.settings, "readout", None) == "zero":
        raise ValueError(
            f"parametrization.{name}.readout=zero starts the head at zero, and with model.tied=true the embedding, "
            "too; choose one of them"
        )
    if Registry("parametrizations").load(name).scales_depth:
        if run.residual.name not in PLAIN_RESIDUALS:
            raise ValueError(
                f"parametrization={name} scales the branches of residual={' or '.join(PLAIN_RESIDUALS)}, and this is "
                f"residual={run.residual.name}; choose mup"
            )
        if run.cross is not None:
            raise ValueError(f"parametrization={name} scales no cross branch; use cross=none, or mup")


PLAIN_RESIDUALS = ("identity", "ode")
OF_RECIPE = (
    data_fit_objective,
    positions_are_added_once,
    head_exists,
    head_can_be_tied,
    embedding_can_be_convolved,
    logits_can_be_capped,
)
OF_RUN = (
    mechanism_is_trainable,
    depth_fits_pattern,
    direction_fits,
    edges_are_given,
    decays_are_read,
    lengths_and_heads_fit,
    linear_maps_are_called,
    cross_has_context,
    parametrization_scales_the_run,
)
