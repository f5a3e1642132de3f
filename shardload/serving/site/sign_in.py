"""Sign-in for browsers, which cannot send a token with each page: a form takes it once, a cookie has a session.

    POST /ui/sign-in   token, next   ─► Set-Cookie: shardload=RANDOM; HttpOnly; SameSite=Strict; Secure with TLS
    POST /ui/sign-out                ─► the session is forgotten

A session is a random number in the server's memory; the cookie says nothing about the token, and is worth nothing
after a restart. Forms are taken from the server's own pages only (`Origin`), and so is whatever else would change
something with the right of a cookie.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from aiohttp import web

from shardload.reports.markup import escaped
from shardload.serving.limits import client_of
from shardload.serving.site.forms import form_fields, is_from_own_page
from shardload.serving.site.pages import SIGN_IN_PATH, SIGN_OUT_PATH, answer, page

SESSION_S = 12 * 3600.0
"""Seconds after which a browser must sign in again."""
_MOST_SESSIONS = 1000
_FAILURE_S = 60.0
_MOST_FAILURES = 10
"""Most wrong tokens of one address in a minute."""
_MOST_FAILURES_ALL = 200
"""Most wrong tokens of all addresses in a minute."""
_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""A path of this server: browsers take ``//`` and ``/\\`` for the beginning of another one's address."""


class Sessions:
    """Sessions of browsers, and how many wrong tokens were given lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds that never go back."""
        self._clock = clock
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._all: tuple[float, int] = (0.0, 0)

    def begin(self) -> str:
        """Return the secret of a new session."""
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = self._clock() + SESSION_S
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return secret

    def is_open(self, secret: str | None) -> bool:
        """Whether a secret is that of a session. A digest is looked up: how long that takes tells nothing of it."""
        if not secret:
            return False
        until_s = self._sessions.get(_digest(secret))
        return until_s is not None and self._clock() < until_s

    def end(self, secret: str | None) -> None:
        """Forget a session."""
        self._sessions.pop(_digest(secret or ""), None)

    def may_try(self, client: str) -> bool:
        """Whether a client may give a token, or has given too many wrong ones."""
        now_s = self._clock()
        since_s, count = self._all
        if now_s - since_s < _FAILURE_S and count >= _MOST_FAILURES_ALL:
            return False
        since_s, count = self._failures.get(client, (0.0, 0))
        return now_s - since_s >= _FAILURE_S or count < _MOST_FAILURES

    def fail(self, client: str) -> None:
        """Count a wrong token."""
        now_s = self._clock()
        self._all = _counted(self._all, now_s)
        self._failures[client] = _counted(self._failures.get(client, (now_s, 0)), now_s)
        self._failures.move_to_end(client)
        while len(self._failures) > _MOST_SESSIONS:
            self._failures.popitem(last=False)


def _counted(before: tuple[float, int], now_s: float) -> tuple[float, int]:
    since_s, count = before
    return (now_s, 1) if now_s - since_s >= _FAILURE_S else (since_s, count + 1)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


class SignIn:
    """Answers requests to sign in and out. ``allows`` decides by the header that a request with a token has."""

    def __init__(self, allows: Callable[[str | None], bool], *, is_needed: bool, failed: Callable[[], None]) -> None:
        """``is_needed`` is whether the server has tokens; ``failed`` is called for each wrong one."""
        self.sessions = Sessions()
        self._allows, self._is_needed, self._failed = allows, is_needed, failed

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the addresses of the forms."""
        router.add_get(SIGN_IN_PATH, self._form)
        router.add_post(SIGN_IN_PATH, self._sign_in)
        router.add_get(SIGN_OUT_PATH, self._form)
        router.add_post(SIGN_OUT_PATH, self._sign_out)

    def is_signed_in(self, request: web.Request) -> bool:
        """Whether a request has the cookie of a session; one that may change something only from the server's pages."""
        if not self.sessions.is_open(request.cookies.get(_cookie(request))):
            return False
        return request.method in ("GET", "HEAD") or is_from_own_page(request)

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the form for a browser that asks for a page without a token; ``None`` for other clients."""
        wants_page = "text/html" in request.headers.get("Accept", "")
        if not wants_page or request.method != "GET":
            return None
        return _form_page(str(request.rel_url), status=401)

    async def _form(self, request: web.Request) -> web.Response:
        if not self._is_needed:
            return _answer("Session", ["<p>This server needs no token: only its own machine can connect.</p>"])
        if not self.is_signed_in(request):
            return _form_page("/")
        button = f'<form method="post" action="{SIGN_OUT_PATH}"><button class="button">Sign out</button></form>'
        return _answer("Session", ["<p>You are signed in. A session ends after twelve hours.</p>", button])

    async def _sign_in(self, request: web.Request) -> web.Response:
        fields = await form_fields(request)
        if not self._is_needed:
            raise web.HTTPSeeOther(SIGN_IN_PATH)
        client, onward = client_of(request.remote or ""), fields.get("next", "/")
        if not self.sessions.may_try(client):
            text = "There were too many wrong tokens. Try again in a minute."
            refused = _form_page(onward, status=429, problem=text)
            refused.headers["Retry-After"] = f"{_FAILURE_S:.0f}"
            return refused
        if not self._allows(f"Bearer {fields.get('token', '')}"):
            self.sessions.fail(client)
            self._failed()
            return _form_page(onward, status=403, problem="This is not a token of this server.")
        found = web.Response(status=303, headers={"Location": _own_path(onward), "Cache-Control": "no-store"})
        found.set_cookie(
            _cookie(request),
            self.sessions.begin(),
            max_age=int(SESSION_S),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.secure or request.headers["Origin"].startswith("https:"),
        )
        return found

    async def _sign_out(self, request: web.Request) -> web.Response:
        await form_fields(request)
        self.sessions.end(request.cookies.get(_cookie(request)))
        found = web.Response(status=303, headers={"Location": SIGN_IN_PATH})
        found.del_cookie(_cookie(request), path="/", httponly=True, samesite="Strict", secure=request.secure)
        return found


def _cookie(request: web.Request) -> str:
    """Return the cookie's name: with TLS, one that browsers take from this very host alone."""
    return "__Host-shardload" if request.secure else "shardload"


def _own_path(text: str) -> str:
    return text if _PATH.fullmatch(text) else "/"


def _form_page(onward: str, *, status: int = 200, problem: str = "") -> web.Response:
    lines = [f'<p class="refusal" role="alert">{escaped(problem)}</p>'] if problem else []
    lines += [
        "<p>A token of this server is a line of the file that its operator gave it.</p>",
        f'<form class="filter" method="post" action="{SIGN_IN_PATH}">',
        f'<input type="hidden" name="next" value="{escaped(_own_path(onward))}">',
        '<label>Token <input type="password" name="token" required maxlength="2000" '
        'autocomplete="current-password"></label>',
        "<button>Sign in</button></form>",
    ]
    return _answer("Sign in", lines, status=status)


def _answer(title: str, lines: list[str], *, status: int = 200) -> web.Response:
    found = answer(page(title, lines, here=SIGN_IN_PATH, scripts=()), status=status)
    found.headers["Cache-Control"] = "no-store"
    return found
