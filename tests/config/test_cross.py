"""A cross mechanism beside the mechanism: what `cross=` resolves to and refuses, the model around it, and a run from
words to α_max."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from stability import sweep
from stability.build import build_model, build_objective
from stability.config.parts import parse_cross, part
from stability.mechanisms import build
from stability.mechanisms._base import AbstractMechanism
from stability.models.backbone import Backbone, num_parameters
from stability.models.block import Block, CrossBranch
from stability.registry import Registry
from stability.residuals import build as build_residual
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.mechanisms.names import ALL, TRAINED, listed
from tests.reading import read_spec

CONTEXT = {"name": "mlm", "context": 8}
TEXT = ["data=text", "objective.context=8", "lr=1e-3"]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def model(lab, **changes) -> Backbone:
    """In float64, with every parameter moved so that no branch is silent."""
    built = build_model(lab.spec(**{"objective": CONTEXT, "cross": "ca"} | changes), 256).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(
                0.1
                * torch.randn(
                    parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(parameter.numel())
                )
            )
    return built


def test_auto_names_the_cross_mechanism_of_each_mechanisms_kind(lab):
    spec = read_spec(
        "sweep",
        [
            *TEXT,
            f"data.path={lab.text}",
            "mechanism=[sa,sw,sc,mix]",
            "cross=auto",
            "cross.cc.rank=2",
            "seeds=1",
            "name=x",
        ],
    )
    named = {run.mechanism.name: run.model_dump(mode="json")["cross"] for run in spec.expand("f" * 64)}
    assert {name: cross["name"] for name, cross in named.items()} == {"sa": "ca", "sw": "ca", "sc": "cc", "mix": "cc"}
    assert {named["sc"]["rank"], named["mix"]["rank"]} == {2}
    assert lab.spec(objective=CONTEXT, mechanism={"name": "sc"}, cross="auto").cross == parse_cross("cc")


def test_no_cross_mechanism_is_the_default(lab):
    assert lab.spec().cross is lab.spec(cross="none").cross is lab.spec(cross={"name": "none"}).cross is None
    spec = read_spec("sweep", ["data=text", f"data.path={lab.text}", "name=x"])
    assert spec.cross is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": {"name": "ca"}}, "^mechanism=ca is a cross mechanism, it needs a context: cross=ca$"),
        ({"mechanism": {"name": "mix", "pattern": ["sa", "cc"]}}, "cc.*cross mechanism|'cc' cannot stand in a pattern"),
        (
            {"cross": "ca"},
            "^cross=ca needs a context, and objective=mlm has none; objective=mlm objective.context=64 gives the 64 "
            "tokens before each",
        ),
        ({"cross": "auto", "objective": {"name": "ar"}}, "^cross=ca needs a context, and objective=ar has none"),
        (
            {"objective": CONTEXT},
            "^objective.context=8 is read by a cross mechanism only; add cross=auto, or objective.context=0$",
        ),
        (
            {"objective": {"name": "mlm", "context": -1}},
            "objective.context=-1: input should be greater than or equal to 0",
        ),
        ({"objective": CONTEXT, "cross": "c"}, "^cross=c: no such cross mechanism; .*auto, ca, cc, none"),
        ({"objective": CONTEXT, "cross": "sc"}, "^cross=sc: no such cross mechanism"),
        (
            {"objective": CONTEXT, "cross": {"name": "ca", "rop": "none"}},
            "^cross.rop: unknown key; did you mean 'rope'",
        ),
        (
            {"objective": CONTEXT, "cross": {"name": "auto", "ca": {"rop": "none"}}},
            "^cross.ca.rop: unknown key; did you mean 'rope'",
        ),
        ({"objective": CONTEXT, "cross": {"name": "auto", "ca": 3}}, "^cross.ca=3: takes settings of ca"),
        (
            {"mechanism": {"name": "sc", "graph": "given"}},
            "mechanism=sc with graph=given takes edges= with every batch, and data=text has none",
        ),
        (
            {"mechanism": {"name": "mix", "sc": {"graph": "given"}}},
            "mechanism=mix with graph=given takes edges= with every batch",
        ),
        (
            {"objective": CONTEXT, "cross": {"name": "cc", "graph": "window"}},
            "^cross.graph=window needs a context as long as model.positions=16, got objective.context=8; choose "
            "auto or complete$",
        ),
        (
            {"objective": CONTEXT, "mechanism": {"name": "sc"}, "cross": {"name": "auto", "cc": {"graph": "window"}}},
            "^cross.cc.graph=window needs a context as long as model.positions=16, got objective.context=8; choose "
            "auto or complete$",
        ),
        (
            {"objective": {"name": "mlm", "context": 16}, "cross": {"name": "cc", "window": 16}},
            "^cross.window=16 must be below model.positions=16$",
        ),
        ({"mechanism": {"name": "sc", "window": 16}}, "window=16 must be below model.positions=16"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(lab, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        lab.spec(**changes)
    assert len(str(caught.value).splitlines()) == 1


def test_a_window_that_is_never_read_is_not_refused(lab):
    assert lab.spec(objective=CONTEXT, cross={"name": "cc", "window": 100}).cross == parse_cross(
        {"name": "cc", "window": 100}
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mechanism=cc", "^mechanism=cc is a cross mechanism, it needs a context: cross=cc"),
        (
            "mechanism=none",
            f"^mechanism=none: no such choice; choices: {listed(*ALL)}$",
        ),
        ("cross=cx", "^cross=cx: no such choice; .*choices: auto, ca, cc, none"),
    ],
)
def test_the_command_line_says_where_a_cross_mechanism_belongs(word, message):
    with pytest.raises(ValueError, match=message):
        read_spec("sweep", [word])


def test_lists_of_mechanisms_hold_those_that_stand_alone():
    with pytest.raises(ValueError, match=f"choices: {listed(*TRAINED)}"):
        part("mechanisms", "sx")
    with pytest.raises(ValueError, match=f"choices: {listed(*TRAINED)}"):
        part("mechanisms", 3)
    registry = Registry("mechanisms")
    assert registry.names(cross=True) == ("ca", "cc")
    assert set(registry.names()) == {*registry.names(cross=True), *registry.names(cross=False)}


def test_every_block_reads_the_context_and_counts_its_parameters(lab):
    width, layers = 16, 2
    with_cross, without = model(lab), model(lab, cross=None, objective={"name": "mlm"})
    branch = 4 * (width**2 + width) + 2 * width
    assert num_parameters(with_cross) == num_parameters(without) + layers * branch + 2 * width
    x, c = tokens(2, 16), tokens(2, 8, seed=1)
    assert not torch.equal(with_cross(x, context_BJ=c), with_cross(x, context_BJ=c.flip(1)))
    for block in with_cross.blocks:
        block.cross.mechanism.out.weight.data.zero_()
        block.cross.mechanism.out.bias.data.zero_()
    assert torch.equal(with_cross(x, context_BJ=c), with_cross(x, context_BJ=c.flip(1)))


def test_branches_start_scaled_by_their_number(lab):
    size = {"name": "x", "layers": 2, "width": 64, "heads": 4, "positions": 16}
    for cross, objective, branches in ((None, {"name": "mlm"}, 4), ("ca", CONTEXT, 6)):
        block = build_model(lab.spec(model=size, cross=cross, objective=objective), 256).blocks[0]
        outs = [
            module for name, module in block.named_modules() if name.endswith("out") and isinstance(module, nn.Linear)
        ]
        assert len(outs) == branches // 2
        for out in outs:
            assert out.weight.std().item() == pytest.approx((3 * out.in_features * branches) ** -0.5, rel=0.06)


@pytest.mark.parametrize("mechanism", ["sa", "sc"])
def test_the_whole_model_ignores_what_padding_of_the_context_holds(lab, mechanism):
    built = model(lab, mechanism={"name": mechanism}, cross="auto")
    x, c = tokens(3, 16), tokens(3, 8, seed=1)
    mask, context_mask = (
        torch.arange(16) < torch.tensor([16, 10, 16])[:, None],
        torch.arange(8) < torch.tensor([8, 3, 0])[:, None],
    )
    found = built(x, mask, context_BJ=c, context_mask_BJ=context_mask)
    other = built(x, mask, context_BJ=torch.where(context_mask, c, (c + 1) % 256), context_mask_BJ=context_mask)
    assert torch.equal(found[mask], other[mask])
    assert not torch.equal(found[mask], built(x, mask, context_BJ=c)[mask])


def test_a_row_without_context_is_that_of_a_model_without_cross_branches(lab):
    for mechanism, cross in (("sa", "ca"), ("sc", "cc")):
        built = model(lab, mechanism={"name": mechanism}, cross=cross)
        x, c = tokens(2, 16), tokens(2, 8, seed=1)
        found = built(x, context_BJ=c, context_mask_BJ=torch.tensor([[True] * 8, [False] * 8]))
        alone = build_model(lab.spec(mechanism={"name": mechanism}), 256).double()
        alone.load_state_dict({key: value for key, value in built.state_dict().items() if key in alone.state_dict()})
        assert torch.equal(found[1], alone(x)[1])
        assert not torch.equal(found[0], alone(x)[0])


def test_the_block_keeps_rows_without_context_whatever_a_mechanism_returns():
    class AddsOne(nn.Module):
        def forward(self, x_BND, context_BJD, *, mask_BN=None, context_mask_BJ=None):
            return torch.full_like(x_BND, float("nan")).where(
                ~context_mask_BJ.any(-1)[:, None, None], torch.ones_like(x_BND)
            )

    branch = CrossBranch(AddsOne(), nn.Identity(), build_residual("identity", width=4))
    block = Block(
        build("sa", width=4, heads=2),
        nn.Linear(4, 4),
        (nn.Identity(), nn.Identity()),
        (build_residual("identity", width=4),) * 2,
        branch,
    )
    from stability.models.block import Context

    state, mask = (
        torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[True, False], [False, False]]),
    )
    assert torch.equal(
        block.cross(state, Context(torch.zeros(2, 2, 4), mask), None), torch.stack([state[0] + 1, state[1]])
    )


def test_a_context_that_is_missing_or_that_nothing_reads_is_told(lab):
    with pytest.raises(ValueError, match="needs a context; give context_BJ="):
        model(lab)(tokens(2, 16))
    with pytest.raises(ValueError, match="read by a cross mechanism only"):
        model(lab, cross=None, objective={"name": "mlm"})(tokens(2, 16), context_BJ=tokens(2, 8))


class TakesEdges(AbstractMechanism):
    """y_i = x_i + Σ_{j: (i, j) ∈ edges} x_j."""

    def forward(self, x_BND, *, mask_BN=None, edges=None):
        return x_BND if edges is None else x_BND.index_add(1, edges[:, 0], x_BND[:, edges[:, 1]])


def test_edges_reach_the_mixers_that_take_them_and_no_other():
    def block(mixer):
        return Block(
            mixer,
            nn.Linear(4, 4),
            (nn.Identity(), nn.Identity()),
            (build_residual("identity", width=4), build_residual("identity", width=4)),
        )

    torch.manual_seed(0)
    both = Backbone(
        nn.Embedding(10, 4), 10, 4, [block(TakesEdges()), block(build("sa", width=4, heads=2))], nn.Identity()
    )
    one = Backbone(nn.Embedding(10, 4), 10, 4, [block(build("sa", width=4, heads=2))], nn.Identity())
    edges, x = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[1, 2, 3]])
    assert not torch.equal(both(x, edges=edges), both(x))
    with pytest.raises(ValueError, match="edges=: no mixer of this model takes it"):
        one(x, edges=edges)
    with pytest.raises(ValueError, match="edgs=: no mixer of this model takes it"):
        both(x, edgs=edges)


def test_a_model_of_given_graphs_takes_its_edges(lab):
    """As for molecules: the spec of a run cannot hold it, but a model can be built around it."""
    mixer = build("sc", width=16, heads=2, graph="given")
    plain = build_model(lab.spec(), 256)
    plain.blocks[0] = Block(
        mixer, nn.Linear(16, 16), (nn.Identity(), nn.Identity()), (build_residual("identity", width=16),) * 2
    )
    x, chain = tokens(2, 5), torch.tensor([[0, 1], [1, 2], [2, 3]])
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    found = plain(x, mask, edges=chain)
    assert found.shape == (2, 5, 256)
    assert not torch.equal(found, plain(x, mask, edges=chain[:2]))


def test_one_command_trains_and_measures_with_a_context(lab, tmp_path):
    words = [
        *TEXT,
        f"data.path={lab.text}",
        f"runs_dir={lab.pool}",
        "launcher=serial",
        "device=cpu",
        "mechanism=[sa,sc]",
        "cross=auto",
        "seeds=1",
    ]
    sizes = [
        "model.layers=2",
        "model.width=16",
        "model.heads=2",
        "model.positions=16",
        "steps=4",
        "batch=4",
        "evaluation.sequences=8",
    ]
    protocol = [
        "curvature.recorded_steps=2",
        "curvature.warmup_steps=1",
        "curvature.warmup_batches=2",
        "curvature.microbatch=3",
    ]
    assert sweep.main([*words, *sizes, *protocol, "report=false", "name=x"]) == 0
    found = collect(lab.pool / "studies" / "x")
    assert found.runs.val_nll.notna().all()
    assert len(found.curvature) == 2 * 2 * 2
    assert found.curvature.rel_error.dropna().lt(1e-2).all()
    assert set(found.curvature.method) == {"taylor"}
    directories = StudyFolder(lab.pool / "studies" / "x").runs()
    assert {json.loads(directory.spec_file.read_text())["cross"]["name"] for directory in directories} == {"ca", "cc"}
    spec, built = checkpoint.load(directories[0].checkpoints()[-1])
    examples = build_objective(spec, 256).examples(tokens(2, 24), torch.Generator().manual_seed(0))
    assert examples.logits(built).shape == (2, 16, 256)


def test_the_data_must_hold_windows_with_their_context(lab):
    words = [
        *TEXT,
        f"data.path={lab.text}",
        f"runs_dir={lab.pool}",
        "report=false",
        "cross=ca",
        "name=x",
        "objective.context=100000",
    ]
    with pytest.raises(ValueError, match="needs at least"):
        sweep.main(words)
