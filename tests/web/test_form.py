"""Words ↔ fields ↔ YAML ↔ words, and every key of every command on the page."""

from __future__ import annotations

import html
import random
import re
import shlex
import subprocess
import sys

import pytest

from stability.cli.compose import compose_values
from stability.cli.conf import choices, conf_dir, preset_words, values_of
from stability.cli.description import describe_choice
from stability.cli.settings import choice_rows, command_rows
from stability.cli.words import Invocation
from stability.config.base import AXES
from stability.config.parse import SPECS
from stability.web import jobs
from stability.web.form import COMMANDS, Form, words_of_text
from tests.web.conftest import Page

HOSTILE = (
    "; rm -rf /",
    "$(reboot)",
    "`id`",
    "a\nb",
    "{}",
    "a,b",
    "[x]",
    "null",
    "1",
    "it's",
    'say "so"',
    "x=1",
    "<script>",
    " ö ",
)


def values(words, command="sweep"):
    """What Hydra makes of the words, apart from the name that they give the study."""
    found = compose_values(SPECS[command], Invocation.of(words))
    # a preset may name these alone, which stands for their defaults
    named = {key: values_of(key, found[key]) for key in ("ffn", "position") if isinstance(found.get(key), str)}
    return {key: value for key, value in (found | named).items() if key != "name"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return Page(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_of_every_command_is_on_its_page_with_its_meaning(opened, command):
    text = html.unescape(opened.get(f"/?command={command}").text)
    for row in command_rows(command):
        assert f'data-key="{row.key}"' in text and row.meaning in text
    keys = set(re.findall(r'data-key="([^"]+)"', text))
    assert {row.key for row in command_rows(command)} <= keys


@pytest.mark.parametrize(
    ("group", "name"),
    [("mechanism", "sc"), ("optimizer", "sgd"), ("objective", "score_entropy"), ("data", "text"), ("search", "optuna")],
)
def test_a_parts_own_settings_are_there_once_it_is_chosen(opened, group, name):
    rows = choice_rows(group, name)
    chosen = html.unescape(opened.get(f"/?k:{group}={name}").text)
    assert rows and all(f'data-key="{row.key}"' in chosen and row.meaning in chosen for row in rows)
    other = opened.get("/").text
    assert group in ("search", "mechanism") or not all(f'data-key="{row.key}"' in other for row in rows)


@pytest.mark.parametrize("study", choices("study"))
def test_a_preset_in_the_form_is_the_preset_on_the_command_line(study):
    form = Form.of_words("sweep", [f"study={study}"])
    assert form.line == f"python -m stability.sweep study={study}"
    assert form.defaults | preset_words("study", study) == form.defaults
    text = (conf_dir() / "study" / f"{study}.yaml").read_text()
    loaded = Form.of_yaml("sweep", text)
    needed = ["data.path=x"] if "data.path" in form.rows and form.defaults["data.path"] in ("(required)", "???") else []
    assert values([*loaded.words, *needed]) == values([*form.words, *needed])


def random_form(draw: random.Random) -> Form:
    """A form with a few random fields of a random command filled in."""
    command = draw.choice(COMMANDS)
    chosen = {axis: f"[{','.join(draw.sample(choices(axis), 2))}]" for axis in AXES if draw.random() < 0.3}
    rows = Form(command, chosen if command == "sweep" else {}).rows
    filled = {}
    for key in draw.sample(list(rows), min(len(rows), draw.randint(1, 8))):
        kind = rows[key].kind
        texts = [
            draw.choice(HOSTILE),
            "null",
            str(draw.randint(0, 9)),
            f"{draw.random():.3g}",
            "[1,2]",
            rows[key].default,
        ]
        texts += [str(word).lower() if isinstance(word, bool) else word for word in kind.choices]
        filled[key] = draw.choice(texts)
    words = [f"{key}={value}" for key, value in {**filled, **(chosen if command == "sweep" else {})}.items() if value]
    return Form.of_words(command, words)


def test_a_thousand_random_forms_are_fixed_points_of_words_shell_and_yaml():
    draw = random.Random(0)
    for _ in range(1000):
        form = random_form(draw)
        words = form.words
        assert Form.of_words(form.command, words).words == words
        assert shlex.split(form.line)[3:] == words
        assert (
            Form.of_yaml("sweep", form.yaml).words == words and Form.of_yaml("sweep", form.yaml).command == form.command
        )
        assert words_of_text(form.more_text) == form.more


def test_a_yaml_that_grows_without_end_is_refused_and_a_deep_one_is_read():
    lines = ["a0: &a0 [x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6))]
    for text in ("\n".join(lines), "a: &a [*a]", "a: &a 3\nb: *a"):
        with pytest.raises(ValueError, match="alias"):
            Form.of_yaml("sweep", text)
    deep = f"lr={'[' * 400}1{']' * 400}"
    form = Form.of_words("sweep", [deep])
    assert form.words == [deep] and "lr" in form.yaml


def test_lines_of_a_text_end_as_in_a_shell_whatever_the_browser_sends(opened):
    text = html.unescape(opened.post("/", {"command": "sweep", "more": "data.path='a\r\nb'"}).text)
    assert "data.path=a\nb" in text and "\r" not in text


def test_only_what_is_filled_in_is_typed(opened):
    fields = {"command": "sweep", "k:seeds": "3", "k:steps": "", "k:mechanism": ["sc", "sa"]}
    text = html.unescape(opened.post("/", fields).text)
    assert "python -m stability.sweep 'mechanism=[sc,sa]' seeds=3" in text


@pytest.mark.parametrize("value", HOSTILE)
def test_a_text_comes_back_as_the_text_it_is(value):
    (word,) = Form("sweep", {"wandb.project": value}).words
    assert values([word])["wandb"]["project"] == value
    assert Form.of_words("sweep", [word]).words == [word]


WRONG = [
    ["steps=0"], ["steps=x"], ["mechanism=[sq]"], ["lr=[1e-3,-1]"], ["mechanism.sc.windw=3"], ["model.width=33"],
    ["seeds=2", "seeds=3"], ["data=text"], ["name=a b"], ["study=none"], ["lr.low=1", "lr=values"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_mistake_is_told_as_the_command_line_tells_it(opened, words, monkeypatch, capsys):
    from stability.cli.entry import _run
    from stability.sweep import main

    assert _run(main, [*words, f"runs_dir={opened.pool}", f"reports_dir={opened.reports}", "dry_run=true"]) == 2
    said = capsys.readouterr().err.removeprefix("error: ").strip()
    text = html.unescape(opened.post("/", {"command": "sweep", "more": shlex.join(words)}).text)
    shown = re.search(r'<p id="problem"[^>]*>(.*?)</p>', text, re.DOTALL)[1]
    if shown:
        assert shown == said
    else:  # only seen with torch: by a check
        monkeypatch.setattr(jobs, "CHECK_S", 300.0)
        assert jobs.Checker().check("sweep", words) == (False, f"error: {said}")


def test_a_mistake_stands_under_its_field(opened):
    text = html.unescape(opened.post("/", {"command": "sweep", "k:steps": "0"}).text)
    assert '<p class="error" id="e-steps">steps=0: input should be greater than or equal to 1</p>' in text
    assert '<p class="error" id="e-batch"></p>' in text


def test_the_page_and_its_live_check_import_no_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from tests.web.conftest import Page
page = Page(Path({str(tmp_path)!r}))
for words in (["mechanism=[sa,sc]"], ["data=text", "data.path=/x/y", "data.keep=3"], ["lr=1e-3", "steps=0"]):
    assert page.post("/", page.compose(words)).status_code == 200
assert page.get("/?command=hessian&k:hf=x").status_code == page.get("/studies").status_code == 200
found = [name for name in ("torch", "pandas", "ray", "matplotlib") if name in sys.modules]
assert not found, found
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_a_presets_description_says_what_it_sets():
    assert describe_choice("study", "quickstart")["sets"]["mechanism"] == "[sa,sc,mix,sw]"
    assert "sets" not in describe_choice("mechanism", "sc")
