"""Browsers sign in by a form; a cookie opens what a token opens, and nothing that another page asks for."""

import http.client
import ssl
import threading
from http.cookies import SimpleCookie

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import send_form, served

from shardload.serving.site.sign_in import SESSION_S, Sessions

TOKEN = "a-token-of-this-server"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    made = tmp_path_factory.mktemp("signed")
    (made / "root" / "models").mkdir(parents=True)
    (made / "root" / "other").mkdir()
    save_file({"x": np.zeros(4)}, made / "root" / "models" / "model.safetensors")
    tokens = made / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    return "--root", made / "root", "--token-file", tokens


@pytest.fixture(scope="module")
def server(options):
    with served(*options) as found:
        yield found


def signed_in(server, **named):
    status, headers, _ = send_form(server, "/ui/sign-in", {"token": TOKEN, "next": "/"}, **named)
    assert (status, headers["Location"]) == (303, "/")
    return SimpleCookie(headers["Set-Cookie"])


def cookie(found):
    return "; ".join(f"{name}={morsel.value}" for name, morsel in found.items())


def test_a_browser_signs_in_and_out(server):
    status, headers, body = server.get("/models/", Accept="text/html,*/*")
    assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
    assert b'name="next" value="/models/"' in body and b'type="password"' in body and b"model.safetensors" not in body
    found = signed_in(server)
    morsel = found["shardload"]
    assert morsel["httponly"] and morsel["samesite"] == "Strict" and morsel["path"] == "/" and not morsel["domain"]
    assert TOKEN not in cookie(found) and len(morsel.value) > 40
    for path in ("/", "/models/model.safetensors", "/api/v1/checkpoints", "/ui/checkpoints/models"):
        assert server.get(path, Cookie=cookie(found))[0] == 200
        assert server.get(path)[0] == 401
    assert b"Sign out" in server.get("/ui/sign-in", Cookie=cookie(found))[2]
    status, headers, _ = send_form(server, "/ui/sign-out", {}, Cookie=cookie(found))
    assert status == 303 and SimpleCookie(headers["Set-Cookie"])["shardload"].value == ""
    assert server.get("/", Cookie=cookie(found))[0] == 401


def test_programs_are_refused_as_before(server):
    status, headers, body = server.get("/")
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and body.startswith(b"Send a token")
    assert server.get("/", method="HEAD", Accept="text/html")[0] == 401


def test_with_tls_the_cookie_is_secure(options, certificate):
    context = ssl.create_default_context(cafile=certificate.path)
    with served(*options, *certificate.options) as server:

        def connection(place, timeout):
            return http.client.HTTPSConnection(place, timeout=timeout, context=context)

        found = signed_in(server, connection=connection)
        assert found["__Host-shardload"]["secure"] and found["__Host-shardload"]["httponly"]
        plain = f"http://{server.place}"
        assert send_form(server, "/ui/sign-in", {"token": TOKEN}, origin=plain, connection=connection)[0] == 403


def test_a_proxy_with_tls_gets_a_secure_cookie(server):
    assert signed_in(server, origin=f"https://{server.place}")["shardload"]["secure"]


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1", "file://", ""])
def test_forms_of_other_pages_are_refused(server, origin):
    for path in ("/ui/sign-in", "/ui/sign-out"):
        status, headers, _ = send_form(server, path, {"token": TOKEN}, origin=origin)
        assert status == 403 and "Set-Cookie" not in headers


def test_a_cookie_is_no_right_to_send_anything_else(server):
    found = cookie(signed_in(server))
    for path in ("/", "/api/v1/checkpoints", "/models/model.safetensors"):
        assert send_form(server, path, {}, origin="http://evil.example", Cookie=found)[0] == 401
        assert send_form(server, path, "x=1", Cookie=found)[0] in (400, 405)


TARGETS = [
    "//evil.example",
    "/\\evil.example",
    "https://evil.example",
    "javascript:x",
    "/\t/evil",
    "/a\r\nX: y",
    "",
    "ü",
]


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_sent_on_to_another_server(server, target):
    status, headers, _ = send_form(server, "/ui/sign-in", {"token": TOKEN, "next": target})
    assert (status, headers["Location"]) == (303, "/") and headers["X"] is None


def test_a_path_is_kept(server):
    status, headers, _ = send_form(server, "/ui/sign-in", {"token": TOKEN, "next": "/ui/checkpoints/a%20b?match=x"})
    assert (status, headers["Location"]) == (303, "/ui/checkpoints/a%20b?match=x")
    body = server.get("/%22%3E%3Cscript%3E", Accept="text/html")[2]
    assert b"<script" not in body and b'">' not in body.partition(b'name="next" value="')[2].partition(b'">')[0]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"token=" + b"x" * 5000, {}, 413),
        (b"&".join(b"a=1" for _ in range(50)), {}, 400),
        (b"token=\xff", {}, 400),
        (b'{"token": "x"}', {"Content-Type": "application/json"}, 415),
        (b"", {}, 403),
    ],
)
def test_forms_that_are_none(options, body, headers, status):
    with served(*options) as server:  # wrong tokens are counted
        assert send_form(server, "/ui/sign-in", body, **headers)[0] == status
        assert server.get("/healthz")[0] == 200


def test_wrong_tokens_are_limited(options):
    with served(*options) as server:
        statuses = [send_form(server, "/ui/sign-in", {"token": f"wrong-{i}"})[0] for i in range(12)]
        assert statuses == [403] * 10 + [429] * 2
        status, headers, body = send_form(server, "/ui/sign-in", {"token": TOKEN})
        assert status == 429 and headers["Retry-After"] == "60" and b"too many" in body
        assert server.get("/", Authorization=f"Bearer {TOKEN}")[0] == 200  # who has one is not kept out by others
        assert TOKEN not in "".join(server.log) and "wrong-" not in "".join(server.log)


def test_without_tokens_there_is_nothing_to_sign_in_to(tmp_path):
    (tmp_path / "other").mkdir()
    with served("--root", tmp_path) as server:
        assert b"needs no token" in server.get("/ui/sign-in")[2]
        status, headers, _ = send_form(server, "/ui/sign-in", {"token": "x"})
        assert status == 303 and "Set-Cookie" not in headers


def test_sessions_end_and_are_few():
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first = sessions.begin()
    assert (
        sessions.is_open(first)
        and not sessions.is_open(None)
        and not sessions.is_open("")
        and not sessions.is_open("x")
    )
    now[0] = SESSION_S - 1
    assert sessions.is_open(first)
    now[0] = SESSION_S
    assert not sessions.is_open(first)
    many = [sessions.begin() for _ in range(1001)]
    assert not sessions.is_open(many[0]) and all(map(sessions.is_open, many[1:]))
    sessions.end(many[5])
    assert not sessions.is_open(many[5])


def test_all_addresses_together_are_limited():
    now = [100.0]
    sessions = Sessions(lambda: now[0])
    for i in range(200):
        assert sessions.may_try(f"10.0.0.{i}")
        sessions.fail(f"10.0.0.{i}")
    assert not sessions.may_try("10.0.1.1")
    now[0] += 60
    assert sessions.may_try("10.0.1.1") and sessions.may_try("10.0.0.1")


def test_a_slow_form_does_not_keep_others_waiting(server):
    head = f"POST /ui/sign-in HTTP/1.1\r\nHost: {server.place}\r\nOrigin: http://{server.place}\r\n"
    slow = f"{head}Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\ntoken=".encode()
    waiting = [threading.Thread(target=server.raw, args=(slow,), daemon=True) for _ in range(20)]
    for each in waiting:
        each.start()
    assert server.get("/healthz")[0] == 200 and signed_in(server)
    for each in waiting:
        each.join()
