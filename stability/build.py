"""Build the model, the objective and the optimizer of a RunSpec."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from stability.config.base import Settings
from stability.config.parts import Part, contexts_of
from stability.config.run import AbstractRecipe, RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.corpora.base import AbstractCorpus
from stability.ffns import AbstractFeedForward
from stability.linears import drop_biases, replace_linears
from stability.mechanisms import MixerShape
from stability.models.backbone import Backbone, HeadShape
from stability.models.block import Block, CrossBranch
from stability.models.condition import Modulation
from stability.models.embedding import EmbeddingConvolution, FactorisedEmbedding
from stability.models.init import initialise, own_parameters, without_memory
from stability.models.scaling import TensorSize, find_sizes, scale_initial_values
from stability.models.tracks import Conditioned
from stability.objectives import AbstractObjective
from stability.optimizers import kinds, optimizer_of
from stability.parametrizations import Growth
from stability.registry import Registry

BYTES_OF_FLOAT32 = 4


def build_objective(spec: AbstractRecipe, data_format: Any) -> AbstractObjective:
    """Return the objective of a run.

    ``data_format`` is the corpus's `format`; for tokens it is the vocabulary's size.
    """
    return Registry("objectives").load(spec.objective.name)(spec.objective.settings, data_format)


def as_read(corpus: AbstractCorpus, objective: Part, pool: Path, *, for_plan: bool = False) -> Any:
    """Return the prepared data in the objective's form (`AbstractObjective.reads`).

    Args:
        corpus: the prepared data.
        objective: the run's objective.
        pool: folder of the runs.
        for_plan: whether placeholders may replace parts not yet trained.
    """
    exported = Registry("objectives").load(objective.name)
    return (exported.reads_for_plan if for_plan else exported.reads)(objective.settings, corpus, pool)


def described(spec: AbstractRecipe, corpus: AbstractCorpus) -> str:
    """Return the data's description for a run's example length."""
    # the objective may read a few tokens more or fewer than the model has positions
    return corpus.describe(build_objective(spec, corpus.format).tokens_needed(spec.model.positions))


def build_model(spec: RunSpec, data_format: Any) -> Backbone:
    """Return the initialised model, on the CPU, in float32.

    The same spec gives the same weights. The global random state is unchanged.
    """
    objective = build_objective(spec, data_format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        blocks = [_block(spec, objective, layer) for layer in range(spec.model.layers)]
        final_norm = _norm(spec, spec.model.width)
        context_norm = _norm(spec, spec.model.width) if _crosses_in_blocks(spec) else None
        table = _table(spec, objective)
        embedding = _embedding(spec, objective, table)
        model = Backbone(
            embedding,
            objective.num_outputs,
            spec.model.width,
            blocks,
            final_norm,
            context_norm,
            objective.condition,
            objective.pool,
            _head(spec, objective, embedding, table),
            spec.model.loops,
            dropout=spec.model.dropout_of("embedding"),
            convolution=_convolution(spec, objective),
        )
        initialise(
            model,
            spec.model.loops * _base_layers(spec) * _branches(spec) + len(contexts_of(spec.objective)),
            spec.model.embedding_std,
            spec.model.init,
        )
        if spec.parametrization.name != "standard":
            _parametrize(spec, data_format, model)
        model.logit_softcap = spec.model.logit_softcap
        if spec.model.qk_bias:
            _start_local(model, embedding, spec.model.qk_bias)
    return model


def _base_layers(spec: RunSpec) -> int:
    """Return the number of blocks that branch outputs are initialised for."""
    base = getattr(spec.parametrization.settings, "base_layers", None)
    return spec.model.layers if base is None else base


def _parametrize(spec: RunSpec, data_format: Any, model: Backbone) -> None:
    """Scale an initialised model by its parametrization. The model keeps the factors for its optimizer."""
    part, settings = Registry("parametrizations").load(spec.parametrization.name), spec.parametrization.settings
    sizes = find_sizes(model, shapes(_base_spec(spec), data_format))
    growth = _growth(spec, model)
    model.factors = {name: part.factors(settings, name, size, growth) for name, size in sizes.items()}
    scale_initial_values(model, model.factors, own_parameters(model))
    model.readout_scale = part.readout(settings, growth)
    for block in model.blocks:
        cast(Any, block).branch_scale = part.branch(settings, growth)


def _base_spec(spec: RunSpec) -> RunSpec:
    """Return the run at its parametrization's base width: as wide heads, and as many blocks."""
    size, width = spec.model, cast(Any, spec.parametrization.settings).base_width
    base = size.model_copy(update={"width": width, "heads": width * size.heads // size.width})
    return spec.model_copy(update={"model": base, "parametrization": Part(name="standard", settings=Settings())})


def _growth(spec: RunSpec, model: Backbone) -> Growth:
    """Return how much larger a model is than its parametrization's base, and how its optimizer steps."""
    optimizer, config = Registry("optimizers").load(spec.optimizer.name), spec.optimizer.settings
    of_kind = kinds(model) if optimizer.takes_matrices else {}

    def update(name: str) -> Any:
        return "adam" if of_kind.get(name) == "rest" else optimizer.update_family

    def built_in(size: TensorSize) -> float:
        own, base = (optimizer.built_in_scale(config, *shape) for shape in (size.shape, size.base_shape))
        return own / base

    width = cast(Any, spec.parametrization.settings).grown(spec.model.width)
    return Growth(width, spec.model.layers / _base_layers(spec), spec.model.init, update, built_in)


def _head(spec: RunSpec, objective: AbstractObjective, embedding: nn.Module, table: nn.Module) -> HeadShape:
    """Return the shape of the head; ValueError if it is tied to a table with too few rows."""
    tied_to = None
    if spec.model.tied:
        assert objective.num_outputs is not None  # rule `head_exists`
        if len(getattr(table, "weight", ())) < objective.num_outputs:
            raise ValueError(
                f"model.tied=true: objective={spec.objective.name} embeds by no table of the "
                f"{objective.num_outputs:,} tokens that it predicts"
            )
        tied_to = next(name for name, module in embedding.named_modules() if module is table)
    return HeadShape(spec.model.head_bias, spec.model.init == "sedd", tied_to)


def _start_local(model: Backbone, embedding: nn.Module, bias: float) -> None:
    """Set initial biases so mixers and cross mechanisms attend to nearby positions first."""
    for block in model.blocks:
        cast(Any, block).mixer.start_local(bias)
    if isinstance(embedding, Conditioned):
        embedding.start_local(bias)


def count_idle_parameters(spec: RunSpec) -> int:
    """Return the number of the model's parameters that a position does not meet."""
    with without_memory():
        ffn = Registry("ffns").load(spec.ffn.name).build(spec.ffn.settings, spec.model.width, spec.model.ffn_multiple)
    return spec.model.layers * ffn.num_idle


def sequence_state_bytes(spec: RunSpec, direction: str) -> int | None:
    """Return the bytes of state needed to continue one sequence, in float32.

    The sequence has the run's length. The state of all layers counts: keys and values, or recurrent states, once per
    loop. None if the model cannot continue a sequence: earlier positions depend on later ones, or on a context.
    """
    size, mechanism = spec.model, Registry("mechanisms").load(spec.mechanism.name)
    shapes = [MixerShape(size.width, size.heads, direction, layer, size.layers) for layer in range(size.layers)]
    numbers = [mechanism.state_size(spec.mechanism.settings, shape, size.positions) for shape in shapes]
    known = [number for number in numbers if number is not None]
    if spec.cross is not None or len(known) < len(numbers):
        return None
    return BYTES_OF_FLOAT32 * size.loops * sum(known)


def _table(spec: RunSpec, objective: AbstractObjective) -> nn.Module:
    """Return the embedding of the inputs, at the model's width."""
    inner_width, width = spec.model.embedding_width, spec.model.width
    if inner_width is None:
        return objective.embedding(width, spec.model.positions)
    return FactorisedEmbedding(objective.embedding(inner_width, spec.model.positions), inner_width, width)


def _convolution(spec: RunSpec, objective: AbstractObjective) -> nn.Module | None:
    """Return the convolution of the embedding, or None."""
    size = spec.model
    if size.embedding_conv is None:
        return None
    is_causal = objective.direction == "causal"
    return EmbeddingConvolution(size.width, size.embedding_conv, is_causal, size.embedding_conv_residual)


def _embedding(spec: RunSpec, objective: AbstractObjective, table: nn.Module) -> nn.Module:
    """Return the input module: ``table``, positions, and contexts that enter before the blocks."""
    embedding = _placed(spec, objective, table)
    contexts = [
        (_placed(spec, objective, embed) if is_aligned else embed, is_aligned)
        for embed, is_aligned in objective.context_embeddings(spec.model.width)
    ]
    if not contexts or spec.cross is None:
        return embedding
    # each context has its own cross mechanism on a plain residual connection
    shape = _shape(spec, objective)
    cross, identity = Registry("mechanisms").load(spec.cross.name), Registry("residuals").load("identity")
    branches, norms = [], []
    for _, is_aligned in contexts:
        settings = spec.cross.settings if is_aligned else cross.for_words(spec.cross.settings)
        connection = identity(identity.Config(), width=shape.width, layer=0)
        mechanism = _mixer(spec, cross.build(settings, shape))
        branches.append(CrossBranch(mechanism, _norm(spec, shape.width), connection, spec.model.dropout))
        norms.append(_norm(spec, shape.width))
    return Conditioned(embedding, contexts, norms, branches)


def _placed(spec: RunSpec, objective: AbstractObjective, embedding: nn.Module) -> nn.Module:
    """Return the embedding with the run's position scheme, for the longest source or context."""
    longest = max(spec.model.positions, objective.num_context(spec.objective.settings))
    return (
        Registry("positions")
        .load(spec.position.name)
        .placed(spec.position.settings, embedding, spec.model.width, longest)
    )


def _shape(spec: RunSpec, objective: AbstractObjective, layer: int = 0, num_layers: int = 1) -> MixerShape:
    scheme, size = Registry("positions").load(spec.position.name), spec.model
    rope, decays = scheme.rope(spec.position.settings), scheme.decays(spec.position.settings)
    dropout, direction = size.dropout_of("attention"), objective.direction
    return MixerShape(size.width, size.heads, direction, layer, num_layers, rope, dropout, size.positions, decays)


def _mixer(spec: RunSpec, module: nn.Module) -> nn.Module:
    """Return a mixer with the run's biases and kind of linear maps."""
    drop_biases(module, spec.model.mixer_bias)
    return _with_linears(spec, module)


def _with_linears(spec: RunSpec, module: nn.Module) -> nn.Module:
    """Return a mixer or feed-forward network with the run's kind of linear maps."""
    replace_linears(module, Registry("linears").load(spec.linear.name), spec.linear.settings)
    return module


def _norm(spec: RunSpec, width: int) -> nn.Module:
    return Registry("norms").load(spec.norm.name).build(spec.norm.settings, width)


def _crosses_in_blocks(spec: RunSpec) -> bool:
    return spec.cross is not None and not contexts_of(spec.objective)


def _branches(spec: RunSpec) -> int:
    """Return the number of residual branches in one block: 3 with a cross mechanism, else 2."""
    return 3 if _crosses_in_blocks(spec) else 2


def _block(spec: RunSpec, objective: AbstractObjective, layer: int) -> Block:
    """Build the block of one layer."""
    size = spec.model
    shape = _shape(spec, objective, layer, size.layers)
    mixer = Registry("mechanisms").load(spec.mechanism.name).build(spec.mechanism.settings, shape)
    ffn = Registry("ffns").load(spec.ffn.name).build(spec.ffn.settings, size.width, size.ffn_multiple)
    for each in ffn.modules():  # experts are feed-forward networks, too
        if isinstance(each, AbstractFeedForward):
            each.dropped.p = size.dropout_of("hidden")
    residual, num = Registry("residuals").load(spec.residual.name), _branches(spec)
    return Block(
        _mixer(spec, mixer),
        _with_linears(spec, ffn),
        norms=(_norm(spec, size.width), _norm(spec, size.width)),
        residuals=tuple(
            residual(spec.residual.settings, width=size.width, layer=number)
            for number in (num * layer, num * layer + num - 1)
        ),
        cross=_cross(spec, shape),
        modulation=None if objective.condition is None else Modulation(objective.condition.width, size.width),
        dropout=size.dropout,
    )


def _cross(spec: RunSpec, shape: MixerShape) -> CrossBranch | None:
    """Build the cross branch of one layer, or None."""
    if spec.cross is None or not _crosses_in_blocks(spec):
        return None
    residual = Registry("residuals").load(spec.residual.name)
    return CrossBranch(
        _mixer(spec, Registry("mechanisms").load(spec.cross.name).build(spec.cross.settings, shape)),
        _norm(spec, shape.width),
        residual(spec.residual.settings, width=shape.width, layer=_branches(spec) * shape.layer + 1),
        spec.model.dropout,
    )


def build_optimizer(spec: RunSpec | TokenizerRunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a run or a tokenizer's stage, over ``model``'s parameters.

    Their order is the model's. There is one parameter group; a second one if weight decay excludes some parameters;
    further ones for roles with their own settings (`stability.optimizers.optimizer_of`).
    """
    part = spec.optimizer
    return optimizer_of(
        Registry("optimizers").load(part.name),
        part.settings,
        part.groups,
        model,
        spec.lr_peak,
        getattr(model, "factors", {}),
    )


def resolve_device(name: str) -> torch.device:
    """Return the device for a name; ``auto`` is cuda if available, else cpu.

    Raises:
        RuntimeError: the name is cuda and there is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device=cuda, but torch sees no CUDA device; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def shapes(spec: RunSpec, data_format: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the model's state by name, allocating nothing."""
    with without_memory():
        return {name: tuple(tensor.shape) for name, tensor in build_model(spec, data_format).state_dict().items()}
