from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.config.base import validate
from stability.config.parts import validate_settings
from stability.config.run import RunSpec
from stability.corpora.proteins.alphabets import BOS, EOS, LETTERS, MASK, NO_SS, PAD, UNK, encode
from stability.corpora.proteins.batch import batch_of
from stability.corpora.proteins.chain import ProteinChain
from stability.models.tracks import SummedEmbedding, Track, TrackEmbedding, TrackInputs
from stability.objectives.multitrack import MultitrackMaskedModel

SIZES = {
    "sequence": 30,
    "structure": 5 + 7,
    "ss": 9,
    "sasa": 16,
    "plddt": 50,
    "domains": 8,
    "descriptions": 9,
    "orthologs": 5,
}
BARE = "AAAAAAAAAAAA"


def protein(name: str, letters: str, seed: int = 0, *, known: bool = True) -> ProteinChain:
    """Random tracks; without ``known`` nothing but sequence and structure tokens."""
    rng, num = np.random.default_rng(seed), len(letters)
    atoms_NAX = rng.normal(size=(num, 14, 3)).astype(np.float32)
    nan = np.full(num, np.nan, np.float32)
    words = {
        "domains_NK": np.where(rng.random((num, 3)) < 0.5, rng.integers(5, 8, (num, 3)), -1),
        "descriptions": rng.integers(5, 9, 4),
    }
    structure_N = np.where(rng.random(num) < 0.8, rng.integers(0, 7, num), -1)
    ss_N = rng.integers(0, 9, num).astype(np.uint8) if known else np.full(num, NO_SS, np.uint8)
    sasa_N = rng.uniform(0, 150, num).astype(np.float32) if known else nan
    numbers_N = np.arange(num, dtype=np.int32)
    tracks = (encode(letters).astype(np.int64), atoms_NAX, ss_N, sasa_N, nan, numbers_N)
    return ProteinChain(name, name, *tracks, structure_N=structure_N, **(words if known else {}))


def some_proteins() -> list[ProteinChain]:
    return [protein("a", "ACDEFGHIKLMNP", 1), protein("b", "WXYVTSRQ", 2), protein("c", BARE, 3, known=False)]


def objective(**settings) -> MultitrackMaskedModel:
    defaults = {"tokenizer": "0" * 12} if "structure" in settings.get("sources", ("structure",)) else {}
    return MultitrackMaskedModel(validate_settings("objectives", "multitrack", defaults | settings), SIZES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run_spec(mechanism: str = "sa", cross: str | None = "auto", **settings) -> RunSpec:
    return validate(
        RunSpec,
        {
            "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 20},
            "objective": {"name": "multitrack", "tokenizer": "0" * 12, **settings},
            "data": {"name": "protein"},
            "schedule": {"name": "constant"},
            "steps": 3,
            "batch": 4,
            "clip_norm": 1.0,
            "mechanism": {"name": mechanism},
            "cross": cross,
            "residual": {"name": "identity"},
            "optimizer": {"name": "adamw"},
            "norm": "layernorm",
            "lr_peak": 1e-3,
            "seed": 0,
            "data_fingerprint": "made up",
        },
    )


def test_tracks_stand_between_bos_and_eos_and_only_content_is_masked():
    for seed in range(20):
        examples = objective(contexts=[]).examples(batch_of(some_proteins()), generator(seed))
        for row, chain in enumerate(some_proteins()):
            structure = [5 + token if token >= 0 else UNK for token in chain.structure_N.tolist()]
            for track, tokens in enumerate((chain.sequence.tolist(), structure)):
                whole = [BOS, *tokens, EOS] + [PAD] * (13 - len(tokens))
                given = examples.inputs_BN.sources[track][row].tolist()
                weights = examples.weights_BN[row, :, track].tolist()
                hidden = [place for place, weight in enumerate(weights) if weight > 0]
                assert hidden and all(whole[place] >= 5 for place in hidden)
                assert given == [MASK if place in hidden else token for place, token in enumerate(whole)]
                assert all(examples.targets_BN[row, place, track] == whole[place] - 5 for place in hidden)
                assert sum(weights) == pytest.approx(1.0, abs=1e-6)
        assert examples.mask_BN is not None and examples.mask_BN.sum(1).tolist() == [15, 10, 14]


def test_rates_are_drawn_from_the_schedule_of_each_track():
    """betalinear30: mean 0.8·3/12 + 0.2·1/2 = 0.30; cosine: mean of sin(πu/2) = 2/π = 0.637; clamping to [0.05, 0.95]
    moves neither by 0.01."""
    chains = [
        protein(str(seed), "".join(np.random.default_rng(seed).choice(list(LETTERS[:20]), 60)), seed)
        for seed in range(40)
    ]
    seen = torch.stack(
        [
            (objective(contexts=[]).examples(batch_of(chains), generator(seed)).weights_BN > 0).sum(1)
            for seed in range(30)
        ]
    ).double()
    assert (seen[..., 0] / 60).mean() == pytest.approx(0.30, abs=0.02)
    known = torch.tensor([(chain.structure_N >= 0).sum() for chain in chains])
    assert (seen[..., 1] / known).mean() == pytest.approx(2 / math.pi, abs=0.03)


def test_the_loss_is_the_sum_over_tracks_of_the_mean_over_proteins_of_the_mean_over_masked_positions():
    chains = [*some_proteins(), protein("d", "XXXXXXXXXX", 4)]  # no letter is known
    own = objective(contexts=[])
    examples = own.examples(batch_of(chains), generator(5))
    logits = torch.randn(4, 15, own.num_outputs, dtype=torch.float64, generator=generator(6))
    expected = []
    for track, (start, size) in enumerate(((0, 25), (25, 7))):
        means = []
        for row in range(4):
            nats = []
            for place in range(15):
                if examples.inputs_BN.sources[track][row, place] == MASK:
                    z = logits[row, place, start : start + size].numpy()
                    nats.append(
                        math.log(sum(math.exp(value) for value in z)) - z[examples.targets_BN[row, place, track]]
                    )
            if nats:
                means.append(sum(nats) / len(nats))
        expected.append(sum(means) / len(means))
    assert len(means) == 4
    total, count = own.loss_sum(logits, examples)
    assert (own.component_sums(logits, examples) / count).tolist() == pytest.approx(expected, rel=1e-6)
    assert float(total / count) == pytest.approx(sum(expected), rel=1e-6)


def test_sources_are_summed_and_domains_averaged_over_those_that_may_be_read():
    torch.manual_seed(0)
    embed = SummedEmbedding([6, 7], 4)
    tokens = torch.tensor([[1, 5, 0]]), torch.tensor([[6, 2, 3]])
    first, second = (module.weight.detach() for module in embed.tracks)  # type: ignore[union-attr]
    for place in range(3):
        assert torch.equal(
            embed(TrackInputs(tokens))[0, place], first[tokens[0][0, place]] + second[tokens[1][0, place]]
        )
    domains = TrackEmbedding(8, 4)
    track = Track(
        torch.tensor([[[5, 6, 0], [7, 0, 0], [0, 0, 0]]]),
        torch.tensor([[[True, True, False], [True, False, False], [False] * 3]]),
    )
    table = domains.table.weight.detach()
    expected = torch.stack([(table[5] + table[6]) / 2, table[7], torch.zeros(4)])
    assert torch.allclose(domains(track)[0], expected, atol=1e-7)
    assert track.entries_BJ.tolist() == [[True, True, False]]


@pytest.mark.parametrize("mechanism", ["sa", "sc"])
def test_a_protein_with_no_context_equals_one_with_contexts_switched_off_exactly(mechanism):
    spec = run_spec(mechanism)
    model, chains = build_model(spec, SIZES).eval(), some_proteins()
    examples = objective().examples(batch_of(chains), generator(1))
    bare = build_model(run_spec(mechanism, None, contexts=[]), SIZES).eval()
    weights = model.state_dict()
    bare.load_state_dict(
        {
            name: weights[name if name in weights else name.replace("embedding.", "embedding.sources.")]
            for name in bare.state_dict()
        }
    )
    without = examples._replace(inputs_BN=TrackInputs(examples.inputs_BN.sources))
    with torch.no_grad():
        conditioned, plain = examples.logits(model), without.logits(bare)
    assert torch.equal(conditioned[2], plain[2])
    assert not torch.allclose(conditioned[0], plain[0], atol=1e-4)


@pytest.mark.parametrize("mechanism", ["sa", "sc", "mix", "sw"])
def test_padding_changes_no_loss(mechanism):
    spec, chains = run_spec(mechanism), some_proteins()
    model, own = build_model(spec, SIZES).double().eval(), objective()
    examples = own.examples(batch_of(chains), generator(1))
    # by the name that plugins know
    longer = examples.each(lambda x: nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 4)) if x.shape[1] == 15 else x)
    assert longer.mask_BN is not None and longer.mask_BN.shape == (3, 19)
    with torch.no_grad():  # what padding holds is large
        model.embedding.sources.tracks[0].weight[PAD] = 1e3  # type: ignore[union-attr]
        one, two = own.loss(model, examples)[0], own.loss(model, longer)[0]
    assert float(one) == pytest.approx(float(two), rel=1e-9)


def test_microbatches_add_up_to_the_batch_and_chunks_to_the_whole():
    model, own, chunked = build_model(run_spec(), SIZES).double().eval(), objective(), objective(loss_chunk=3)
    examples = own.examples(batch_of(some_proteins()), generator(2))
    with torch.no_grad():
        total, count, scores = own.validate(model, examples)
        parts = [own.validate(model, part) for part in examples.split(2)]
        in_chunks = chunked.validate(model, examples)
    assert float(count) == 3 == sum(float(part[1]) for part in parts)
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(total), rel=1e-12)
    assert set(scores) == {"val_nll_sequence", "val_nll_structure"}
    for name, value in scores.items():
        assert float(in_chunks[2][name]) == pytest.approx(float(value), rel=1e-12)
    assert float(sum(scores.values())) == pytest.approx(float(in_chunks[0]), rel=1e-12)


def test_context_entries_are_hidden_at_the_rate_of_their_schedule():
    """√u has the mean 2/3; at least 0.05 and at most 0.95 is hidden."""
    chains = [protein(str(seed), "A" * 60, seed) for seed in range(40)]
    own = objective(contexts=["ss", "domains"])
    shown = []
    for seed in range(30):
        ss, domains = own.examples(batch_of(chains), generator(seed)).inputs_BN.contexts
        shown.append(float(ss.mask.sum() / (40 * 60)))
        assert not ss.mask[:, [0, -1]].any() and not domains.mask[:, [0, -1]].any()
        whole = torch.stack([torch.from_numpy(chain.domains_NK >= 0) for chain in chains])
        seen = domains.mask[:, 1:-1].any(-1)
        assert torch.equal(domains.mask[:, 1:-1], whole & seen[..., None]), (
            "all domains of a residue are hidden together"
        )
    assert np.mean(shown) == pytest.approx(1 / 3, abs=0.02)


def test_frequencies_of_content_alone_are_the_baseline():
    own = objective(contexts=[])
    examples = own.examples(batch_of(some_proteins()), generator(2))
    log_frequencies = torch.log(torch.arange(1.0, 38.0))
    logits = own.unigram_logits(log_frequencies, examples)
    assert logits.shape == (3, 15, 32)
    assert torch.equal(logits[1, 2], torch.cat([log_frequencies[5:30], log_frequencies[30:]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "structure among objective.sources needs objective.tokenizer=ID of one that python -m "
            "stability.train_tokenizer trained; without one",
        ),
        (
            {"sources": ["sequence"], "tokenizer": "0" * 12},
            "objective.tokenizer=000000000000 changes nothing here: it belongs to structure among",
        ),
        ({"sources": ["sequence", "sequence"]}, r"objective.sources=\[sequence,sequence\] names a track twice"),
        (
            {"sources": ["sequence"], "contexts": [], "context_mask_rate": "cosine"},
            "objective.context_mask_rate=cosine changes nothing here",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        validate_settings("objectives", "multitrack", settings)
    assert len(str(refused.value).splitlines()) == 1


def test_contexts_without_a_cross_mechanism_and_the_reverse_are_refused():
    with pytest.raises(
        ValueError,
        match=r"objective.contexts=\[ss\] is read by cross mechanisms only; add cross=auto, or objective.contexts=\[\]",
    ):
        run_spec(cross=None, contexts=["ss"])
    with pytest.raises(
        ValueError,
        match=r"cross=ca needs a context, and objective=multitrack has none with objective.contexts=\[\]; add cross=none",
    ):
        run_spec(contexts=[])


def test_the_order_in_which_tracks_are_named_makes_no_other_run():
    one, two = (
        validate_settings("objectives", "multitrack", {"sources": ["sequence"], "contexts": names})
        for names in (["ss", "sasa"], ["sasa", "ss"])
    )
    assert one == two


def test_words_are_read_from_everywhere_even_where_there_are_as_many_as_positions():
    branches: Any = build_model(run_spec("sc"), SIZES).embedding.branches
    assert [branch.mechanism.config.graph for branch in branches] == ["auto"] * 4 + ["complete"] * 2


def test_attention_to_an_aligned_context_begins_at_each_position_s_own_place():
    spec = run_spec()
    local = spec.model_copy(update={"model": spec.model.model_copy(update={"qk_bias": 2.0})})
    for own, is_local in ((spec, False), (local, True)):
        branches: Any = build_model(own, SIZES).embedding.branches
        for branch, is_aligned in zip(branches, [True] * 4 + [False] * 2, strict=True):
            biases = torch.cat([branch.mechanism.q.bias, branch.mechanism.kv.bias])
            expected = [2.0] * 32 + [0.0] * 16 if is_local and is_aligned else [0.0] * 48
            assert biases.tolist() == expected
