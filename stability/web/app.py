"""The pages and their verbs: routes, and the templates that they fill."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import mimetypes
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from stability.cli.compose import compose_values, find_name, list_plugins
from stability.cli.mistakes import check_repetitions, make_printable
from stability.cli.words import Invocation
from stability.config.base import validate
from stability.config.entries import DashboardSpec, DescribeSpec, ReportSpec, StatusSpec, TransferSpec
from stability.config.parse import SPECS
from stability.runs.directory import RunDirectory, mtime_ns, read_json
from stability.runs.words import shown_status
from stability.web import figures, jobs
from stability.web.form import COMMANDS, OPEN, PRESET, SWEEP, Form, command_of, join_names, words_of_text
from stability.web.guard import Guard
from stability.web.watching import Pool, Watched, differences, find_file, is_study_name

HERE = Path(__file__).resolve().parent
FIELD = "k:"  # prefix of a field's name in the form
TICK_S, QUIET_S = 1.0, 15.0  # between looks at the files, and between signs of life
WITHOUT_PARTS = (DescribeSpec, ReportSpec, StatusSpec, TransferSpec, DashboardSpec)  # validated without torch
# a report's page has scripts of its own, so it is shown without any right on this page
OF_REPORT = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:"
)


class Pages:
    """Handlers of all routes."""

    def __init__(self, runs_dir: Path, reports_dir: Path):
        self.pool, self.reports = Pool(runs_dir), reports_dir.resolve()
        self._checker, self._composing = jobs.Checker(), threading.Lock()
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        self._templates.filters["value"] = _show

    def routes(self) -> list[Route]:
        """Return the routes; an effect has a POST of its own."""
        get: dict[str, Callable[..., Any]] = {
            "/studies": self.studies,
            "/studies/{name}": self.study,
            "/studies/{name}/live": self.study,
            "/studies/{name}/figures": self.study_figures,
            "/studies/{name}/events": self.study_events,
            "/runs/{run_id}": self.run,
            "/runs/{run_id}/figures": self.run_figures,
            "/runs/{run_id}/events": self.run_events,
            "/runs/{run_id}/files/{path:path}": self.run_file,
            "/reports/{file}": self.report_file,
            "/static/{file}": self.static,
        }
        post: dict[str, Callable[..., Any]] = {
            "/check": self.check,
            "/yaml": self.download,
            "/start": self.start,
            "/studies/{name}/stop": self.stop,
            "/studies/{name}/go_on": self.go_on,
            "/studies/{name}/report": self.make_report,
        }
        pages = [Route(path, page, methods=["GET"]) for path, page in get.items()]
        effects = [Route(path, page, methods=["POST"]) for path, page in post.items()]
        return [Route("/", self.compose, methods=["GET", "POST"]), *pages, *effects]

    def compose(self, request: Request) -> Response:
        """Show the form that the fields fill in; of a change only the part that has changed."""
        fields = _fields(request)
        form, problem = self._read_form(fields)
        if "hx-request" not in request.headers:
            return self._form_page(request, form, problem)
        if dict(fields).get("shown") == _shown(form):
            return self._form_page(request, form, problem, "side.html")
        answer = self._form_page(request, form, problem, "form.html")
        answer.headers.update({"HX-Retarget": "#compose", "HX-Reswap": "outerHTML"})
        return answer

    def check(self, request: Request) -> Response:
        """Show the plan of a sweep, or the mistake, as the command line prints it."""
        form, problem = self._read_form(_fields(request))
        is_valid, text = (False, problem) if problem else self._checker.check(form.command, form.words)
        plan = {"plan": text, "is_valid": is_valid}
        if "hx-request" in request.headers:
            return self._answer(request, "plan.html", **plan, key=form.problem_key(text.removeprefix("error: ")))
        return self._form_page(request, form, "" if is_valid else text.removeprefix("error: "), **plan)

    def download(self, request: Request) -> Response:
        """Send the words as YAML."""
        form, _ = self._read_form(_fields(request))
        name = f'attachment; filename="{form.command}.yaml"'
        return Response(form.yaml, media_type="application/yaml", headers={"Content-Disposition": name})

    def start(self, request: Request) -> Response:
        """Start a sweep, and show its study."""
        form, problem = self._read_form(_fields(request))
        try:
            if problem or form.command != SWEEP:
                raise ValueError(problem or f"{form.command}: copy the command into a terminal; only sweeps start here")
            invocation = Invocation.of(form.words)  # a plugin's code runs in the sweep only
            values = invocation.given if list_plugins(invocation) else self._compose_values(form)
            name = str(values.get("name") or find_name(invocation, str(self.pool.path)))
            if not is_study_name(name):
                raise ValueError(f"name={name}: is no name of a study")
            jobs.start(self.pool.path / "studies" / name, SWEEP, form.words)
        except (OSError, ValueError) as error:
            return self._form_page(request, form, str(error))
        return RedirectResponse(f"/studies/{name}", 303)

    def _read_form(self, fields: list[tuple[str, str]]) -> tuple[Form, str]:
        """Return the form of a request's fields, and its first mistake or ""."""
        given = dict(fields)
        command = given["command"] if given.get("command") in COMMANDS else SWEEP
        values: dict[str, list[str]] = {}
        for name, value in fields:
            if name.startswith(FIELD) and value.strip():
                values.setdefault(name.removeprefix(FIELD), []).append(value.strip())
        try:
            if "from" in given:
                form = Form.of_words(SWEEP, self._polled(given["from"]).words or ())
            elif given.get("load") and given.get("paste", "").strip():
                form = Form.of_yaml(command, given["paste"])
            else:
                form = Form.of_words(command, [f"{key}={join_names(names)}" for key, names in values.items()])
                form = Form(command, form.values, (*form.more, *words_of_text(given.get("more", ""))))
        except ValueError as error:
            return Form(command, {}), str(error)
        form = form.at(self.pool.path, self.reports)
        return form, self._find_problem(form) if fields else ""  # an empty form has none

    def _find_problem(self, form: Form) -> str:
        """Return the command line's own message on the first mistake that is seen without torch, or ""."""
        invocation = Invocation.of(form.words)
        try:
            check_repetitions(invocation)
            if list_plugins(invocation):  # their code runs in a check of its own only
                return ""
            kind, values = SPECS[form.command], self._compose_values(form)
            if kind in WITHOUT_PARTS:
                validate(kind, values)
            elif form.command == SWEEP and Path(str(values["runs_dir"])).resolve() != self.pool.path:
                return f"runs_dir={values['runs_dir']}: this page shows {self.pool.path}; leave runs_dir out"
        except ValueError as error:
            return make_printable(str(error), invocation)
        return ""

    def _compose_values(self, form: Form) -> dict[str, Any]:
        with self._composing:  # Hydra has one state for all threads
            try:
                return compose_values(SPECS[form.command], Invocation.of(form.words))
            finally:
                gc.unfreeze()  # a server lives longer than a command

    def _form_page(
        self, request: Request, form: Form, problem: str, page: str = "compose.html", **more: Any
    ) -> Response:
        about = {"form": form, "problem": problem, "key": form.problem_key(problem), "shown": _shown(form), **more}
        purpose = command_of(form.command).purpose
        return self._answer(request, page, commands=COMMANDS, purpose=purpose, opened=OPEN, **about)

    def studies(self, request: Request) -> Response:
        """Show all studies, a row each."""
        found = [self._polled(name) for name in self.pool.names()]
        return self._answer(request, "studies.html", studies=found, pool=self.pool.path)

    def study(self, request: Request) -> Response:
        """Show one study, or the parts of its page that change."""
        watched, place = self._study(request), request.url.path.rpartition("/")[2]
        made = [file for file in (f"{watched.name}.pdf", f"{watched.name}.html") if (self.reports / file).is_file()]
        about = {"study": watched, "windows": watched.window_table(), "reports": made}
        return self._answer(request, "live.html" if place == "live" else "study.html", **about)

    def study_figures(self, request: Request) -> Response:
        """Return a study's figures."""
        return JSONResponse(figures.study_figures(self._study(request)))

    async def study_events(self, request: Request) -> Response:
        """Stream an event for each change of a study's files."""
        watched = await run_in_threadpool(self._study, request)
        return _stream(watched.poll)

    def stop(self, request: Request) -> Response:
        """Stop a study's sweep as Ctrl-C does."""
        watched = self._study(request)
        if watched.job is not None:
            jobs.stop(watched.job)
        return RedirectResponse(f"/studies/{watched.name}", 303)

    def go_on(self, request: Request) -> Response:
        """Run a study's command again."""
        watched = self._study(request)
        if (words := watched.words) is None:
            raise HTTPException(404, "this study's command is not known word by word; copy it into a terminal")
        given = {word.partition("=")[0] for word in words}  # the server's folder may differ from the terminal's
        places = Form(SWEEP, {}).at(self.pool.path, self.reports).values
        words += [f"{key}={path}" for key, path in places.items() if key not in given]
        if problem := self._find_problem(Form.of_words(SWEEP, words)):
            return Response(problem, 409)
        return self._start(watched, SWEEP, words, jobs.SWEEP)

    def make_report(self, request: Request) -> Response:
        """Make a study's PDF and page."""
        watched = self._study(request)
        places = [f"runs_dir={self.pool.path}", f"reports_dir={self.reports}"]
        return self._start(watched, "report", [f"name={watched.name}", "format=[pdf,html]", *places], jobs.REPORT)

    def _start(self, watched: Watched, command: str, words: list[str], kind: str) -> Response:
        try:
            jobs.start(watched.folder.path, command, words, kind)
        except (OSError, ValueError) as error:
            return Response(str(error), 409)
        return RedirectResponse(f"/studies/{watched.name}", 303)

    def _study(self, request: Request) -> Watched:
        return self._polled(request.path_params["name"])

    def _polled(self, name: str) -> Watched:
        """Return a study after a look at its files; 404 for an unknown one."""
        watched = self.pool.study(name)
        if watched is None:
            raise HTTPException(404)
        watched.poll()
        return watched

    def run(self, request: Request) -> Response:
        """Show one run, beside others if asked."""
        directory = self._run(request.path_params["run_id"])
        try:
            spec = read_json(directory.spec_file)
        except ValueError as error:
            raise HTTPException(404, str(error)) from None
        names = self.pool.studies_of(directory.run_id)
        rows = self._polled(names[0]).rows if names else []
        base, base_id = (rows[0].trial.spec, rows[0].trial.run_id) if rows else (spec, "")
        label = next((row.trial.label for row in rows if row.trial.run_id == directory.run_id), directory.run_id)
        status = directory.status()
        about: dict[str, Any] = {"run": directory, "status": status, "label": label, "studies": names}
        about["state"] = shown_status(status)
        about |= {"spec": json.dumps(spec, indent=1), "differing": differences(spec, base), "base": base_id}
        others = [row for row in rows if row.trial.run_id != directory.run_id]
        about |= {"others": others, "beside": _ids(request), "files": _list_files(directory.path)}
        return self._answer(request, "run.html", **about)

    def run_figures(self, request: Request) -> Response:
        """Return the curves of a run, beside others if asked."""
        ids = [request.path_params["run_id"], *_ids(request)]
        runs = [(f"{run_id}: " if len(ids) > 1 else "", self._run(run_id)) for run_id in ids]
        return JSONResponse(figures.run_figures(runs))

    async def run_events(self, request: Request) -> Response:
        """Stream an event for each change of a run's logs."""
        directory = self._run(request.path_params["run_id"])
        logs = [directory.status_file, directory.metrics_file, *directory.signal_files.values()]
        return _stream(lambda: tuple(map(mtime_ns, logs)))

    def run_file(self, request: Request) -> Response:
        """Send a file of a run."""
        return _attach(find_file(self._run(request.path_params["run_id"]).path, request.path_params["path"]))

    def _run(self, run_id: str) -> RunDirectory:
        directory = self.pool.run(run_id)
        if directory is None:
            raise HTTPException(404)
        return directory

    def report_file(self, request: Request) -> Response:
        """Send a study's PDF, or show its page without any right on this one."""
        path = find_file(self.reports, request.path_params["file"])
        if path is None or not is_study_name(path.stem) or path.suffix not in (".pdf", ".html"):
            raise HTTPException(404)
        if path.suffix == ".pdf":
            return _attach(path)
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": OF_REPORT})

    def static(self, request: Request) -> Response:
        """Send a file of this page, or the browser library of plotly's package."""
        name = request.path_params["file"]
        path = _find_plotly() if name == "plotly.min.js" else find_file(HERE / "static", name)
        if path is None:
            raise HTTPException(404)
        return FileResponse(path, headers={"Cache-Control": "private, max-age=3600"})

    def _answer(self, request: Request, template: str, **about: Any) -> HTMLResponse:
        page = self._templates.get_template(template).render(csrf=request.state.csrf, path=request.url.path, **about)
        return HTMLResponse(page)


def make_app(runs_dir: Path, reports_dir: Path, hosts: Iterable[str], token: str, *, once: bool = True) -> Starlette:
    """Return the application.

    Args:
        runs_dir: folder of the pool of runs.
        reports_dir: folder of the reports.
        hosts: values of the header Host that are this page's.
        token: the secret in the printed address.
        once: whether it opens the page to one browser only.
    """
    guard = Middleware(Guard, hosts=tuple(hosts), token=token, once=once)
    return Starlette(routes=Pages(runs_dir, reports_dir).routes(), middleware=[guard])


def _fields(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a form, or of an address."""
    return request.state.form if request.method == "POST" else list(request.query_params.multi_items())


def _shown(form: Form) -> str:
    """Return the choices that decide which fields the form has, and their defaults."""
    named = [f"{group}={name}" for group, name in form.choices]
    return " ".join([form.command, form.values.get(PRESET, ""), *named])


def _stream(look: Callable[[], Any]) -> StreamingResponse:
    """Return a stream with an event at once, and one for each change of a value that is looked at every second."""

    async def events() -> AsyncIterator[str]:
        seen, quiet_s = await run_in_threadpool(look), 0.0
        yield "retry: 2000\nevent: rows\ndata: \n\n"  # of a change since the page was made
        while True:
            await asyncio.sleep(TICK_S)
            now, quiet_s = await run_in_threadpool(look), quiet_s + TICK_S
            if now != seen:
                seen, quiet_s = now, 0.0
                yield "event: rows\ndata: \n\n"
            elif quiet_s >= QUIET_S:
                quiet_s = 0.0
                yield ": alive\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _attach(path: Path | None) -> FileResponse:
    if path is None:
        raise HTTPException(404)
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return FileResponse(path, media_type=kind, filename=path.name)


def _find_plotly() -> Path | None:
    """Return the browser library in plotly's package, which is not imported."""
    found = importlib.util.find_spec("plotly")
    places = found.submodule_search_locations if found is not None else None
    return None if not places else Path(places[0]) / "package_data" / "plotly.min.js"


def _list_files(folder: Path) -> list[tuple[str, int]]:
    """Return the plain files of a run by path, with their sizes in bytes; hidden ones and links are left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    named = ((str(path.relative_to(folder)), path.stat().st_size) for path in found)
    return [(name, size) for name, size in named if not any(part.startswith(".") for part in Path(name).parts)]


def _ids(request: Request) -> list[str]:
    return [run_id for run_id in request.query_params.get("with", "").split(",") if run_id][:6]


def _show(value: Any) -> str:
    return "--" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
