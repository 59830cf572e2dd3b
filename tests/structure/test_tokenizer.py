from __future__ import annotations

import numpy as np
import pytest
import torch

from stability.corpora.proteins.alphabets import VOCAB_SIZE
from stability.structure.crops import first_parts, pad_chains, random_crops
from stability.structure.frames import aligned_squared_error
from stability.structure.tokenizer import PADDING, build_tokenizer
from tests.structure.small import chain, chains, spec


def tokenizer(**changes):
    return build_tokenizer(spec(**changes), VOCAB_SIZE).eval()


@pytest.mark.parametrize("mechanism", ["sa", "sc", {"sw": {}}, {"name": "mix", "pattern": ["sa"]}])
def test_any_mechanism_stands_inside_and_every_parameter_of_a_stage_gets_a_gradient(mechanism):
    made, residues = tokenizer(mechanism=mechanism), pad_chains(chains(3))
    decoded = made.reconstruct(residues.coords_BNAX, residues.mask_BN)
    assert decoded.shape == residues.coords_BNAX.shape
    target = residues.coords_BNAX.flatten(1, 2)
    aligned_squared_error(decoded.flatten(1, 2), target, residues.mask_BN.repeat_interleave(3, 1)).mean().backward()
    without = {
        name
        for name, parameter in made.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    }
    assert all(name.startswith("atom_decoder.") for name in without if "bias" not in name), without


def test_encoding_is_deterministic_and_padding_is_no_token():
    made, residues = tokenizer(), pad_chains(chains(4))
    tokens = made.encode(residues.coords_BNAX, residues.mask_BN)
    assert torch.equal(tokens, made.encode(residues.coords_BNAX, residues.mask_BN))
    assert tokens.dtype == torch.int64
    assert (tokens[~residues.mask_BN] == PADDING).all()
    assert ((tokens[residues.mask_BN] >= 0) & (tokens[residues.mask_BN] < made.num_tokens)).all()
    decoded = made.decode(tokens)
    assert torch.equal(decoded.isfinite().all(-1).all(-1), residues.mask_BN)


def test_a_chain_has_the_same_tokens_beside_a_longer_one_and_whatever_its_gaps_hold():
    made, alone, beside = tokenizer(), pad_chains([chain(1, 12)]), pad_chains([chain(1, 12), chain(2, 30)])
    expected = made.encode(alone.coords_BNAX, alone.mask_BN)
    poisoned = torch.where(beside.mask_BN[..., None, None], beside.coords_BNAX, torch.nan)
    assert torch.equal(made.encode(poisoned, beside.mask_BN)[:1, :12], expected)
    torch.testing.assert_close(
        made.decode(made.encode(poisoned, beside.mask_BN))[:1, :12],
        made.decode(expected),
        equal_nan=True,
        rtol=1e-4,
        atol=1e-4,
    )


def test_decoding_gives_what_reconstruction_trains():
    made, residues = tokenizer(), pad_chains(chains(3))
    trained = made.reconstruct(residues.coords_BNAX, residues.mask_BN)
    used = made.decode(made.encode(residues.coords_BNAX, residues.mask_BN))
    torch.testing.assert_close(used[residues.mask_BN], trained[residues.mask_BN], rtol=1e-5, atol=1e-5)


def test_the_atom_decoder_reads_the_sequence_and_only_where_residues_are_valid():
    made, residues = tokenizer(), pad_chains(chains(3))
    tokens = made.encode(residues.coords_BNAX, residues.mask_BN)
    atoms = made.decode_atoms(tokens, residues.sequence_BN)
    assert atoms.shape == (*tokens.shape, 14, 3)
    other = torch.where(residues.mask_BN, residues.sequence_BN, (residues.sequence_BN + 1) % VOCAB_SIZE)
    torch.testing.assert_close(made.decode_atoms(tokens, other), atoms, equal_nan=True)
    changed = residues.sequence_BN.clone()
    changed[0, 0] = (changed[0, 0] + 1) % VOCAB_SIZE
    assert (made.decode_atoms(tokens, changed)[0, 1] - atoms[0, 1]).abs().max() > 0


def test_what_cannot_be_encoded_or_decoded_is_refused_in_words():
    made, residues = tokenizer(atom_steps=0), pad_chains(chains(2))
    tokens = made.encode(residues.coords_BNAX, residues.mask_BN)
    with pytest.raises(ValueError, match=r"no stage 2 \(atom_steps=0\)"):
        made.decode_atoms(tokens, residues.sequence_BN)
    with pytest.raises(ValueError, match=r"expected \(B, N, 3, 3\)"):
        made.encode(residues.coords_BNAX[:, :, :2], residues.mask_BN)
    bad = residues.coords_BNAX.clone()
    bad[0, 0, 1] = torch.nan
    with pytest.raises(ValueError, match="not finite; mask it out"):
        made.encode(bad, residues.mask_BN)
    with pytest.raises(ValueError, match="lie in 0 … 174"):
        made.decode(tokens + 500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": {"sa": {}, "sc": {}}}, r"mechanism=\[sa,sc\]: a tokenizer has one mechanism"),
        (
            {"mechanism": {"name": "mix", "pattern": ["sa", "sc"]}},
            "encoder.layers=1: mechanism=mix has a pattern of 2 layers",
        ),
        ({"kernel": 4}, "kernel=4 must be odd"),
        ({"cross": "none"}, "cross=none: the stage-2 decoder reads the sequence"),
        (
            {"warmup_steps": 6},
            r"warmup_steps=6 must be below steps=6 and atom_steps=\d+; give warmup_steps=\d+ or less, or more steps$",
        ),
        (
            {"steps": 1, "atom_steps": 0, "warmup_steps": 1},
            "^warmup_steps=1 must be below steps=1; give warmup_steps=0, or more steps$",
        ),
        (
            {"decoder": {"layers": 1, "width": 3, "heads": 1}},
            r"decoder.heads=1 must divide decoder.width=3 .*; decoder.width must be even",
        ),
        ({"encoder": {"layers": 1, "width": 16, "heads": 3}}, r"encoder.heads=3 must divide encoder.width=16"),
        ({"levels": [7, 1]}, "levels.1=1"),
        ({"mechanism": "ca"}, "mechanism=ca is a cross mechanism"),
        ({"frame": "own"}, "frame='own': input should be 'principal' or 'raw'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_crops_are_contiguous_parts_and_a_function_of_the_generator():
    own = [chain(7, 30), chain(8, 9)]
    crops = random_crops(own, 40, 12, torch.Generator().manual_seed(0))
    again = random_crops(own, 40, 12, torch.Generator().manual_seed(0))
    assert torch.equal(crops.coords_BNAX, again.coords_BNAX)
    starts = set()
    for coords, mask in zip(crops.coords_BNAX.numpy(), crops.mask_BN.numpy(), strict=True):
        found = [
            (source.id, start)
            for source in own
            for start in range(max(1, len(source) - 11))
            if np.array_equal(source.mask_N[start : start + 12], mask[: len(source.mask_N[start : start + 12])])
            and np.array_equal(
                np.nan_to_num(source.coords_NAX[start : start + 12]), coords[: len(source.mask_N[start : start + 12])]
            )
        ]
        assert len(found) == 1
        starts.add(found[0])
    assert ("T008_A", 0) in starts and len(starts) > 8
    assert {("T007_A", 0), ("T007_A", 18)} & starts


def test_chains_with_hardly_a_valid_residue_are_left_out_of_measurements():
    empty = chain(3, 8)
    empty.atoms14_NAX[3:] = np.nan
    assert [part.id for part in first_parts([chain(1, 12), empty], 16)] == ["T001_A"]
