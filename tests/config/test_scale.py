"""Fields that take several values, each with a curve of its own."""

from operator import attrgetter

import pytest

from stability.config.identity import run_id
from stability.config.scale import read_axes
from stability.runs.results import _sizes
from tests.reading import read_spec


def spec_of(*words):
    return read_spec("sweep", ["mechanism=[sa]", "lr=[1e-3,1e-2]", "hessian=false", *words])


def test_each_width_is_a_curve_and_a_run_keeps_plain_numbers():
    spec = read_spec("sweep", ["mechanism=[sa,sc]", "lr=1e-3", "model.width=[32,64]", "model.head_width=16"])
    kinds = [(label, run.mechanism.name, run.model.width, run.model.heads) for label, run in spec.kinds()]
    assert kinds == [
        ("width=32", "sa", 32, 2), ("width=64", "sa", 64, 4), ("width=32", "sc", 32, 2), ("width=64", "sc", 64, 4),
    ]  # fmt: skip
    assert all(run.model.head_width is None for _, run in spec.kinds())


def test_a_size_of_a_list_is_the_run_of_that_size_alone():
    listed = {label: run_id(run) for label, run in spec_of("model.width=[32,64]", "model.head_width=16").kinds()}
    for width, heads in ((32, 2), (64, 4)):
        ((_, alone),) = spec_of(f"model.width={width}", f"model.heads={heads}").kinds()
        assert listed[f"width={width}"] == run_id(alone)


def test_warm_up_and_cadences_keep_their_shares_of_the_steps():
    spec = spec_of("steps=[200,400,100]", "schedule.warmup_steps=20", "evaluation.every_steps=50")
    found = [(run.steps, run.schedule.warmup_steps, run.evaluation.every_steps) for _, run in spec.kinds()]
    assert found == [(200, 20, 50), (400, 40, 100), (100, 10, 25)]
    assert [run.checkpoint.every_steps for _, run in spec.kinds()] == [0, 0, 0], "0 stays 0: no extra checkpoints"


def test_a_cadence_that_varies_itself_is_taken_as_it_is():
    spec = spec_of("steps=[200,400]", "vary.schedule.warmup_steps=[0,50]")
    found = {label: (run.steps, run.schedule.warmup_steps) for label, run in spec.kinds()}
    assert found == {f"warmup_steps={warm} steps={steps}": (steps, warm) for warm in (0, 50) for steps in (200, 400)}


def test_precisions_stand_within_each_size():
    labels = [label for label, _ in spec_of("model.layers=[1,2]", "precision=[float32,bf16]").kinds()]
    assert labels == ["layers=1", "layers=1 precision=bf16", "layers=2", "layers=2 precision=bf16"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary.model.positions=[32,64]"], "vary.model.positions: cannot vary within a sweep; fields that can: steps"),
        (["vary.data.path=[a,b]"], "vary.data.path: cannot vary"),
        (["vary.steps=100"], "vary.steps=100: must be a list"),
        (["vary.optimizer.adamw.beta2=[0.9,0.95]"], "ablate.NAME, e.g. ablate.adamw.beta2=[0.95,0.999]"),
        (["vary.adamw.beta2=[0.9,0.95]"], "settings of parts with ablate.NAME, e.g. ablate.adamw.beta2=[0.95,0.999]"),
        (["model.width=[32,32]"], "32 is listed twice"),
        (["model.width=[32,64]", "vary.model.width=[32,64]"], "both list its values"),
        (["model.width=[32,64]", "model.layers=[1,2]", "batch=[8,16]"], "at most 2 fields may vary"),
        (["model.width=[32,64]", "ablate.sa.mask_diagonal=[false,true]"], "varies beside ablate; choose one"),
        (
            ["model.width=[32,64]", "parametrization=[standard,mup]"],
            "needs heads of one width: add model.head_width=16",
        ),
        (
            ["steps=[100,200]", "parametrization=[mup]", "parametrization.mup.base_width=32", "lr.scaled=true"],
            "lr=scaled gives each optimizer rates of its own size",
        ),
        (["model.width=[32,40]", "model.head_width=16"], "model.head_width=16 must divide model.width=40"),
        (["steps=[100,0]"], "steps=0"),
        (["vary.model.speed=[1,2]"], "speed"),
    ],
)
def test_lists_that_make_no_sweep_are_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=".*") as error:
        spec_of(*words).kinds()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_list_moves_out_of_its_place_and_others_stay():
    values = {"model": {"width": [32, 64], "layers": 2}, "steps": 100, "data": {"name": "stdlib"}}
    found = read_axes(values)
    assert found["model"] == {"width": 32, "layers": 2} and found["steps"] == 100
    assert found["vary"] == [{"field": "model.width", "values": [32, 64]}]
    assert values["model"]["width"] == [32, 64], "the caller's values are untouched"
    assert read_axes(found) == found


def test_a_run_says_its_sizes_as_the_sweep_labels_them():
    spec = spec_of("model.width=[32,64]", "steps=[100,200]")
    for label, run in spec.kinds():
        fields = [axis.field for axis in spec.vary]
        assert " ".join(_sizes(run.model_dump(mode="json"), fields)) == label


def test_a_size_that_is_no_number_is_refused_with_a_parametrization_too():
    words = [
        "mechanism=[sa]",
        "lr=1e-3",
        "parametrization=[mup]",
        "model.width=[32,abc]",
        "model.head_width=16",
        "hessian=false",
    ]
    with pytest.raises(ValueError, match="model.width='abc': input should be a valid integer"):
        read_spec("sweep", words).kinds()


@pytest.mark.parametrize(
    ("words", "path", "values"),
    [
        (["vary.clip_norm=[0.3,1,null]"], "clip_norm", [0.3, 1.0, None]),
        (["vary.clip_norm=[null,1]"], "clip_norm", [None, 1.0]),
        (["vary.schedule.warmup_steps=[0,20,100]", "steps=200"], "schedule.warmup_steps", [0, 20, 100]),
        (["vary.model.embedding_std=[0.1,1]"], "model.embedding_std", [0.1, 1.0]),
        (["vary.batch=[8,32]"], "batch", [8, 32]),
        (["ablate.adamw.beta2=[0.99,0.999]"], "optimizer.settings.beta2", [0.999, 0.99]),
        (["ablate.adamw.epsilon=[1e-8,1e-6]"], "optimizer.settings.epsilon", [1e-8, 1e-6]),
    ],
)
def test_interventions_vary_with_a_curve_for_each_value(words, path, values):
    kinds = read_spec("sweep", ["mechanism=sa", "launcher=serial", *words]).kinds()
    assert [attrgetter(path)(run) for _, run in kinds] == values
    assert len({label for label, _ in kinds}) == len({run_id(run) for _, run in kinds}) == len(values)
