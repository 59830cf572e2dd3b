"""Who may talk to the page: one browser with the printed token, on the page's own address."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 1_000_000  # bytes of a form
EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"  # plotly fills an empty <style> by its own script
HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; "
        f"style-src 'self' {EMPTY}; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
}
ELSEWHERE = "this page has another address: the printed one; with ssh -L the same port on both sides"
REFUSED = "open the address that python -m stability.web has printed; its token works once, in one browser"


class Guard:
    """Middleware before every page: Host, token or cookie, and for POST Origin, Sec-Fetch-Site and a form's token.

    Args:
        app: the page.
        hosts: values of Host that are ours, e.g. ``127.0.0.1:8000``.
        token: the secret in the printed address.
        once: whether it opens the page to one browser only.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str, *, once: bool = True):
        self._app, self._hosts, self._token, self._once = app, frozenset(hosts), token, once
        self._session, self.csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        # a page that resolves its own name to this machine sends another Host
        is_ours, body = request.headers.get("host", "") in self._hosts, None
        response = self._let_in(request) if is_ours else PlainTextResponse(ELSEWHERE, 403)
        if response is None and request.method == "POST":
            body = await self._read_body(request)
            response = self._refuse_post(request, body)
        scope["state"] = {"form": body, "csrf": self.csrf}

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (response or self._app)(scope, receive, add_headers)

    def _let_in(self, request: Request) -> PlainTextResponse | RedirectResponse | None:
        """Return None for our browser; a redirect with the cookie for the token; else a refusal."""
        name = f"stability_{request.url.port or 80}"
        if secrets.compare_digest(request.cookies.get(name, "").encode(), self._session.encode()):
            return None
        given = request.query_params.get("token", "")
        if request.method != "GET" or not given or not secrets.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse(REFUSED, 403)
        if self._once:
            self._token = secrets.token_urlsafe(32)
        rest = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
        answer = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), 303)
        answer.set_cookie(name, self._session, httponly=True, samesite="strict", path="/")
        return answer

    async def _read_body(self, request: Request) -> list[tuple[str, str]] | None:
        """Return the fields of a form, their lines ended as in a shell; None for another body, or too long a one."""
        kind = request.headers.get("content-type", "").partition(";")[0]
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_BODY:
                return None
        if kind != "application/x-www-form-urlencoded":
            return None
        try:
            return parse_qsl(body.decode().replace("%0D%0A", "%0A"), keep_blank_values=True, max_num_fields=5000)
        except ValueError:
            return None

    def _refuse_post(self, request: Request, body: list[tuple[str, str]] | None) -> PlainTextResponse | None:
        """Return a refusal of a POST that our own form has not sent."""
        headers, own = request.headers, {f"http://{host}" for host in self._hosts}
        site = headers.get("sec-fetch-site", "same-origin")
        if headers.get("origin") not in own or site != "same-origin":
            return PlainTextResponse("this form was sent by another page", 403)
        if body is None:
            return PlainTextResponse("no form of this page", 403)
        if not secrets.compare_digest(dict(body).get("csrf", "").encode(), self.csrf.encode()):
            return PlainTextResponse("this form is of an earlier page; load it again", 403)
        return None
