"""A study of many variants of one mechanism: each has a look and one name, whatever speaks of it."""

import itertools
import json

import matplotlib
import pytest

from analysis.claims import judging
from analysis.drawing import style
from analysis.drawing.style import DASHES, RC
from analysis.numbers.mixers import groups, numbers_of
from analysis.report import summary
from analysis.sections import ablation
from analysis.study.load import load
from analysis.words import shorten, value_text, wrap
from tests.analysis.synthetic import write_study
from tests.analysis.test_mixers import HIGHER, LOWER, SA, measured_side_by_side, write_mixers

MIXERS = ("gla", "deltanet", "gated_deltanet", "hgrn2", "kda", "mamba", "mamba2", "retnet", "titans")
PATTERN = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "sa"]


def tell(folder, part, setting, values):
    """Add to a study's record that a setting was varied, the first of its values the base's."""
    described = [
        {"value": value, "variant": f"{setting}={text}" if place else ""}
        for place, value in enumerate(values)
        for text in [f"[{','.join(value)}]" if isinstance(value, list) else value]
    ]
    told = json.loads((folder / "study.json").read_text())
    item = {"axis": "mechanism", "part": part, "setting": setting, "values": described}
    (folder / "study.json").write_text(json.dumps(told | {"ablations": [item]}))
    return folder


@pytest.fixture(scope="module")
def two_ways(tmp_path_factory):
    """Nine mixers read in two ways, beside sa and sc."""
    kinds = {"sa": SA, "sc": HIGHER, "two_way": LOWER} | {f"two_way of={name}": LOWER for name in MIXERS[1:]}
    return tell(write_mixers(tmp_path_factory.mktemp("two"), kinds, seeds=2), "two_way", "of", MIXERS)


def test_many_variants_have_a_colour_each_and_the_base_the_mechanisms(two_ways):
    looks = style.looks(load(two_ways))
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == len(looks)
    own = style.mechanism_looks(["sa", "sc", "two_way"])
    for series, mechanism in (("sa", "sa"), ("sc", "sc"), ("two_way of=gla", "two_way")):
        assert (looks[series].color, looks[series].marker, looks[series].dashes) == (*own[mechanism], "-")


def test_more_variants_than_colours_keep_the_mechanisms_and_differ_by_dashes(tmp_path):
    settings = [{"variant": each} for each in ("", "window=4", "window=8")]
    names = ["sa", "sc", "sw", "mix", "fox", "gla"]  # 18 kinds, 12 variants: more than there are colours
    looks = style.looks(load(write_study(tmp_path, mechanisms=names, lrs=[1e-3], seeds=1, settings=settings)))
    own = [look for series, look in looks.items() if series.startswith("sc")]
    assert len({look.color for look in own}) == 1 and len({str(look.dashes) for look in own}) == 3


def test_a_variant_has_a_colour_of_its_own_as_long_as_there_is_one(tmp_path):
    settings = [{"variant": each} for each in ("", "window=4")]
    looks = style.looks(load(write_study(tmp_path, mechanisms=["sa", "sc"], lrs=[1e-3], seeds=1, settings=settings)))
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == 4
    assert looks["sc"].color == style.FIXED["sc"][0]


def test_no_two_series_look_alike_as_long_as_dashes_last(tmp_path):
    names = [f"m{place}" for place in range(len(style.OTHERS) * len(DASHES) // 2)]
    looks = style.looks(load(write_study(tmp_path, mechanisms=names, lrs=[1e-3], seeds=1, curves=False)))
    assert len(set(looks.values())) > len(style.OTHERS)
    assert (
        len(
            set(
                style.looks(
                    load(write_study(tmp_path, name="ten", mechanisms=names[:10], lrs=[1e-3], seeds=1))
                ).values()
            )
        )
        == 10
    )


def test_labels_of_an_ablation_that_would_overlap_are_turned_and_no_longer_do(two_ways):
    with matplotlib.rc_context(RC):
        figure = ablation.figures(load(two_ways))["ablation-0"].figure
        figure.draw_without_rendering()
    (ax,) = figure.axes
    labels = ax.get_xticklabels()
    assert [label.get_text() for label in labels] == list(MIXERS)
    assert {label.get_rotation() for label in labels} == {ablation.TURNED_DEGREES}
    ends = [label.get_transform().transform(label.get_position())[0] for label in labels]
    assert all(other - one > RC["xtick.labelsize"] for one, other in itertools.pairwise(ends))
    assert all(figure.bbox.y0 <= label.get_window_extent().y0 for label in labels)


def test_the_ablations_figure_has_the_colours_of_the_others(two_ways):
    study = load(two_ways)
    (ax,) = ablation.figures(study)["ablation-0"].figure.axes
    looks = style.looks(study)
    drawn = {line.get_xdata()[0]: line.get_color() for line in ax.lines if line.get_marker() == "_"}
    assert drawn == {place: looks[f"two_way of={name}"].color for place, name in enumerate(MIXERS)}


def test_the_base_of_an_ablation_has_one_name_everywhere(two_ways):
    study = load(two_ways)
    names = {f"two_way of={name}" for name in MIXERS}
    assert set(study.series) == {"sa", "sc"} | names
    assert {each.name for each in numbers_of(study, groups(study)[0]).values()} == set(study.series)
    assert set(study.runs.loc[study.runs["mechanism"] == "two_way", "base"]) == {"two_way of=gla"}
    assert set(study.runs["variant"]) == {"", *(f"of={name}" for name in MIXERS[1:])}
    said = " ".join([summary(two_ways), *(f"{claim.text} {claim.effect}" for claim in judging.judge(study))])
    assert said.count("two_way") > 50
    assert "two_way " not in said.replace("two_way of", "").replace("two_way\n", "")


def test_throughput_that_was_measured_before_the_base_had_its_name_is_still_its_own(two_ways):
    measured_side_by_side(two_ways, ["sa", "two_way", "two_way of=kda"])
    rows = load(two_ways).throughput["rows"]
    (two_ways / "results" / "throughput.json").unlink()
    assert [row["series"] for row in rows] == ["sa", "two_way of=gla", "two_way of=kda"]


def test_names_that_repeat_in_a_pattern_are_counted(tmp_path):
    kinds = {"sa": SA, "fox": SA, "mix": HIGHER, f"mix pattern=[{','.join(PATTERN)}]": LOWER}
    study = load(tell(write_mixers(tmp_path, kinds, seeds=1), "mix", "pattern", [["gla", "gla", "sa"], PATTERN]))
    assert set(study.series) == {"sa", "fox", "mix pattern=[2×gla,sa]", "mix pattern=[3×gated_deltanet,sa]"}
    assert f"pattern=[{','.join(PATTERN)}]" in set(study.runs["variant"])
    assert shorten("pattern=[sa,sc,sa]") == "pattern=[sa,sc,sa]"
    assert value_text([4, 4, 8]) == "[4,4,8]" and value_text([True, True]) == "[true,true]"
    assert value_text(PATTERN) == "[3×gated_deltanet,sa]"


def test_a_name_is_broken_where_its_parts_meet():
    assert wrap("two_way of=gated_deltanet", 22) == "two_way\nof=gated_deltanet"
    assert wrap("mix pattern=[3×gated_deltanet,sa]", 22) == "mix pattern=\n[3×gated_deltanet,sa]"
    assert wrap("of=gated_deltanet", 10) == "of=gated_\ndeltanet"
    assert wrap("a" * 25, 22) == "a" * 22 + "\naaa"
