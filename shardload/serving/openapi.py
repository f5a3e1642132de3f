"""The description of a server's addresses for programs, in the form of OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from shardload import __version__
from shardload.serving.jobs.records import JOB_KINDS, JOB_STATES

_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PARTS = {"multipart/byteranges": {"schema": {"type": "string", "format": "binary"}}}
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_ICON: dict[str, Any] = {"image/svg+xml": {}}
_LOAD = {
    "type": "object",
    "required": ["client", "checkpoint", "bytes", "sent", "is_live"],
    "properties": {
        "client": {"type": "string"},
        "checkpoint": {"type": "string"},
        "step": {"type": "integer", "minimum": 0},
        "bytes": {"type": "integer", "minimum": 0, "description": "Of the checkpoint, or of the step"},
        "sent": {"type": "integer", "minimum": 0},
        "handed_files": {"type": "integer", "minimum": 0},
        "running_requests": {"type": "integer", "minimum": 0},
        "bytes_per_s": {"type": "integer", "minimum": 0, "description": "Over the last seconds"},
        "seconds": {"type": "number"},
        "is_live": {"type": "boolean"},
    },
}
_SCRIPT: dict[str, Any] = {"text/javascript": {}}
_TEXT_SCHEMA = {"type": "string"}
_PATH = {"name": "path", "in": "path", "required": True, "schema": _TEXT_SCHEMA, "description": "May contain slashes"}
_STEP = {"name": "step", "in": "query", "schema": {"type": "integer", "minimum": 0}, "description": "Of a run"}
_QUERY = (
    {"name": "match", "in": "query", "schema": _TEXT_SCHEMA, "description": "Words that shown tensors have"},
    {"name": "group", "in": "query", "schema": _TEXT_SCHEMA, "description": "How the names of shown tensors begin"},
)
_MESH = {
    "name": "mesh",
    "in": "query",
    "schema": {"type": "string", "maxLength": 64},
    "example": "2x4",
    "description": "Sizes, or axes with sizes: data=2,model=4",
}
_VARIABLE = {"name": "variable", "in": "query", "schema": _TEXT_SCHEMA, "description": "Shown on each device"}
_PLAN = {
    "type": "object",
    "required": ["source", "mesh", "devices", "weight_bytes", "bytes", "layout"],
    "description": "As `shardload plan --json` prints it, with as many hosts as devices",
}
_TENSORS = {
    "type": "object",
    "required": ["source", "format", "files", "parameters", "bytes", "tensors"],
    "description": "As `shardload inspect --json` prints it",
    "properties": {
        "files": {"type": "object", "additionalProperties": {"type": "integer"}},
        "tensors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "shape", "dtype", "bytes"],
                "properties": {
                    "name": {"type": "string"},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "dtype": {"type": "string"},
                    "bytes": {"type": "integer", "minimum": 0},
                },
            },
        },
    },
}
_CHECKPOINT = {
    "type": "object",
    "required": ["name", "format", "kind", "files", "bytes"],
    "properties": {
        "name": {"type": "string", "description": "Its address below the server's"},
        "format": {"type": "string"},
        "kind": {"enum": ["file", "folder", "run"]},
        "files": {"type": "integer", "minimum": 1},
        "bytes": {"type": "integer", "minimum": 0},
        "steps": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "source": {"type": "string", "description": "Address that it is fetched from; absent if it is here"},
        "cached_bytes": {"type": "integer", "minimum": 0, "description": "Bytes of it in the server's cache"},
    },
}
_ENTRY = {
    "type": "object",
    "required": ["name", "kind"],
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["file", "folder"]},
        "size": {"type": "integer", "minimum": 0, "description": "Bytes of a file"},
        "etag": {"type": "string"},
    },
}


_COUNT = {"type": "integer", "minimum": 0}
_COUNTS = {"type": "object", "additionalProperties": _COUNT}
_MOMENT = {"type": ["number", "null"], "description": "Seconds since 1970"}
_CACHED = {
    "type": "object",
    "required": ["name", "source", "bytes", "cached_bytes", "used_s", "is_in_use", "is_pinned"],
    "properties": {
        "name": {"type": "string", "description": "Its address below the server's"},
        "source": {"type": "string"},
        "bytes": _COUNT,
        "cached_bytes": _COUNT,
        "used_s": _MOMENT,
        "is_in_use": {"type": "boolean", "description": "It was used in the last two minutes, and so is not removed"},
        "is_pinned": {"type": "boolean", "description": "By --pin: it is not removed"},
    },
}
_PEER = {
    "type": "object",
    "required": ["url", "state", "since_s", "answered_s", "blocks", "bytes", "problem"],
    "properties": {
        "url": {"type": "string"},
        "state": {"enum": ["this server", "reachable", "left out", "not asked"]},
        "since_s": _MOMENT,
        "answered_s": _MOMENT,
        "blocks": _COUNT,
        "bytes": _COUNT,
        "problem": {"type": ["string", "null"], "description": "Why it is left out"},
    },
}
_CACHE = {
    "type": "object",
    "required": ["cache", "blocks", "received_bytes", "peers"],
    "properties": {
        "cache": {
            "type": ["object", "null"],
            "required": ["folder", "limit_bytes", "used_bytes", "removed_bytes", "is_on", "notes", "checkpoints"],
            "properties": {
                "folder": {"type": "string"},
                "limit_bytes": _COUNT,
                "used_bytes": _COUNT,
                "removed_bytes": _COUNT | {"description": "To make room, since the server started"},
                "is_on": {"type": "boolean", "description": "Whether it stores more"},
                "notes": {"type": "array", "items": {"type": "string"}},
                "checkpoints": {"type": "array", "items": _CACHED},
            },
        },
        "blocks": _COUNTS,
        "received_bytes": _COUNTS,
        "peers": {"type": "array", "items": _PEER},
    },
}


def document() -> dict[str, Any]:
    """Return the description of all addresses."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shardload serve",
            "version": __version__,
            "description": "Checkpoints, the byte ranges of their files, and jobs. Nothing here changes a checkpoint.",
        },
        "security": [{}, {"token": []}],
        "paths": {
            "/healthz": _only("get", "Whether the server answers", {"200": _answer("It does", _TEXT)}, is_open=True),
            "/readyz": _only(
                "get",
                "Whether the server takes more requests",
                {
                    "200": _answer("It does", _TEXT),
                    "503": _answer("It is to end, or did not reach an address of --root yet", _TEXT),
                },
                is_open=True,
            ),
            "/metrics": _only("get", "Counters for Prometheus", {"200": _answer("All of them", _TEXT)}),
            "/openapi.json": _only("get", "This document", {"200": _object({"type": "object"})}),
            "/api/v1/server": _only("get", "What the server is", {"200": _object(_SERVER)}),
            "/api/v1/checkpoints": _only("get", "The checkpoints", {"200": _object(_list("checkpoints", _CHECKPOINT))}),
            **_job_paths(),
            "/api/v1/runs/{path}": _only("get", "The steps of a training run", _run_answers(), _run_parameters()),
            "/api/v1/checkpoints/{path}/tensors": _only(
                "get", "The tensors of a checkpoint", _examined(_TENSORS), [_PATH, _STEP]
            ),
            "/api/v1/checkpoints/{path}/plan": _only(
                "get", "What a load onto a mesh would do", _examined(_PLAN), [_PATH, _STEP, _MESH | {"required": True}]
            ),
            "/api/v1/loads": _only("get", "What clients read now", {"200": _object(_list("loads", _LOAD))}),
            "/ui/loads": _only("get", "The same as a page", {"200": _answer("A page", _PAGE)}),
            "/ui/jobs": _only("get", "The jobs as a page", {"200": _answer("A page", _PAGE)})
            | _posted(
                "Start or cancel a job", ("kind", "checkpoint", "cancel"), _job_refusals(_TEXT | _PAGE), is_open=False
            ),
            "/api/v1/cache": _only("get", "The cache, and the peers", {"200": _object(_CACHE)}),
            "/ui/cache": _only("get", "The same as a page", {"200": _answer("A page", _PAGE)}),
            "/ui/sign-in": _only("get", "The form that takes a token", {"200": _answer("A page", _PAGE)}, is_open=True)
            | _posted(
                "Begin a session of a browser",
                ("token", "next"),
                {"429": _answer("Too many wrong tokens, or requests", _PAGE | _TEXT)},
            ),
            "/ui/sign-out": _only(
                "get", "The form that ends a session", {"200": _answer("A page", _PAGE)}, is_open=True
            )
            | _posted("End a session of a browser", (), {"429": _answer("Too many requests", _TEXT)}),
            "/ui/icon.svg": _only("get", "What tabs show", {"200": _answer("A picture", _ICON)}, is_open=True),
            "/ui/plans/{path}": _only("get", "A plan as a page", _examined(None), [_PATH, _STEP, _MESH, _VARIABLE]),
            "/ui/checkpoints/{path}": _only(
                "get", "The page of a checkpoint", _examined(None), [_PATH, _STEP, *_QUERY]
            ),
            "/ui/site.css": _only(
                "get", "What pages look like", {"200": _answer("CSS", {"text/css": {}})}, is_open=True
            ),
            "/ui/site.js": _only("get", "What pages do while typing", {"200": _answer("A script", _SCRIPT)}),
            "/ui/table.js": _only("get", "What tables do", {"200": _answer("A script", _SCRIPT)}),
            "/": _only("get", "The checkpoints as a page, or as a list", {"200": _folder()}),
            "/{path}": _only("get", "Bytes of a file, or what is in a folder", _file_answers(), _file_parameters()),
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "A line of --token-file"}},
        },
    }


_SERVER = {
    "type": "object",
    "required": ["server"],
    "properties": {
        "server": {"const": "shardload"},
        "id": {"type": "string", "description": "Another one each time the server starts"},
        "socket": {
            "type": ["string", "null"],
            "description": "Abstract socket of Linux that hands open files to processes of this machine",
        },
    },
}

_JOB = {
    "type": "object",
    "required": ["id", "kind", "checkpoint", "state", "done_bytes", "total_bytes"],
    "properties": {
        "id": {"type": "string"},
        "kind": {"enum": list(JOB_KINDS)},
        "checkpoint": {"type": "string", "description": "Its address below the server's, or that of a step"},
        "state": {"enum": list(JOB_STATES)},
        "done_bytes": {"type": "integer", "minimum": 0},
        "total_bytes": {"type": "integer", "minimum": 0},
        "result": {"type": ["object", "null"], "description": "What a job found, or why it failed"},
        "created_s": {"type": "number", "description": "Seconds since 1970"},
        "ended_s": {"type": ["number", "null"]},
        "key": {"type": ["string", "null"], "description": "The Idempotency-Key it was asked for with"},
    },
}
_ASKED_JOB = {
    "type": "object",
    "required": ["kind", "checkpoint"],
    "additionalProperties": False,
    "properties": {"kind": {"enum": list(JOB_KINDS)}, "checkpoint": {"type": "string"}},
}


def _job_paths() -> dict[str, Any]:
    submitted = _job_refusals(_TEXT) | {
        "200": _object(_JOB),
        "201": _object(_JOB),
        "408": _answer("The body did not arrive in time", _TEXT),
        "413": _answer("The body is too long", _TEXT),
        "415": _answer("The body is not JSON", _TEXT),
    }
    submit = _only("post", "Verify or prefetch a checkpoint", submitted, changes=True)["post"]
    submit["parameters"] = [
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"}}
    ]
    submit["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ASKED_JOB}}}
    missing = {"404": _answer("There is no such job", _TEXT)}
    number = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    stream = {"200": _answer("Server-sent events `job`, each with a job", {"text/event-stream": {}})}
    busy = {"503": _answer("Too many streams are open", _TEXT)}
    return {
        "/api/v1/jobs": _only("get", "The jobs", {"200": _object(_list("jobs", _JOB))}) | {"post": submit},
        "/api/v1/jobs/{id}": _only("get", "One job", {"200": _object(_JOB)} | missing, number)
        | _only("delete", "Cancel a job", {"200": _object(_JOB)} | missing, changes=True),
        "/api/v1/jobs/{id}/events": _only("get", "A job until it ends", stream | missing | busy, number),
    }


def _job_refusals(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "404": _answer("There is no such checkpoint, or no such job", content),
        "422": _answer("The Idempotency-Key belongs to another job, or it cannot be verified here", content),
        "429": _answer("Too many jobs wait, of all clients or of this one", content),
        "503": _answer("The job cannot be stored", content),
    }


def _list(name: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: {"type": "array", "items": items}}}


def _answer(description: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description} | ({"content": content} if content else {})


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    return _answer("An object", {"application/json": {"schema": schema}})


def _folder() -> dict[str, Any]:
    listed = {"application/json": {"schema": _list("entries", _ENTRY)}}
    return _answer("A page with a link for each name, or with Accept: application/json a list", _PAGE | listed)


def _file_answers() -> dict[str, Any]:
    whole = _folder()["content"] | _BYTES
    return {
        "200": _answer("The whole file, with Repr-Digest if its SHA-256 is known, or what is in a folder", whole),
        "206": _answer("One range, or several as multipart/byteranges", _BYTES | _PARTS),
        "301": _answer("A folder: its address ends with a slash"),
        "304": _answer("The file still has the ETag of If-None-Match"),
        "404": _answer("There is no such file", _TEXT),
        "412": _answer("The file does not have the ETag of If-Match"),
        "416": _answer("The file is shorter, or the ranges overlap, go backwards or are too many", _TEXT),
        "502": _answer("The address that the file is fetched from does not answer, or refuses", _TEXT),
    }


def _run_answers() -> dict[str, Any]:
    steps = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return {
        "200": _object({"type": "object", "required": ["steps"], "properties": {"steps": steps}}),
        "304": _answer("The steps still have the ETag of If-None-Match"),
        "404": _answer("There is no such run", _TEXT),
    }


def _run_parameters() -> list[dict[str, Any]]:
    text = {"type": "string"}
    path = {"name": "path", "in": "path", "required": True, "schema": text, "description": "May contain slashes"}
    prefer = "wait=SECONDS: with the ETag of If-None-Match, answer when the steps change, or after up to 60 s"
    return [
        path,
        {"name": "If-None-Match", "in": "header", "schema": text},
        {"name": "Prefer", "in": "header", "schema": text, "description": prefer},
    ]


def _file_parameters() -> list[dict[str, Any]]:
    names = ("Range", "If-Range", "If-Match", "If-None-Match")
    return [_PATH, *({"name": name, "in": "header", "schema": _TEXT_SCHEMA} for name in names)]


def _posted(summary: str, names: tuple[str, ...], answers: dict[str, Any], *, is_open: bool = True) -> dict[str, Any]:
    """Return an operation that takes a form, from the server's own pages only."""
    fields = {"type": "object", "properties": dict.fromkeys(names, _TEXT_SCHEMA)}
    refusals = {"403": "Another page sent it, or no token", "413": "Too long", "415": "No form"}
    found = {
        "303": _answer("Where to go on"),
        "400": _answer("No form", _TEXT | _PAGE),
        "421": _answer("Not this machine", _TEXT),
    }
    found |= {status: _answer(text, _TEXT | _PAGE) for status, text in refusals.items()}
    body = {"content": {"application/x-www-form-urlencoded": {"schema": fields}}}
    if not is_open:
        found["401"] = _answer("A token is needed, or a session of a browser", _TEXT)
    operation = {"summary": summary, "requestBody": body, "responses": found | answers}
    return {"post": operation | ({"security": []} if is_open else {})}


def _examined(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is answered about a checkpoint that another process reads: an object, or without one a page."""
    refusal = _PAGE if schema is None else {"application/json": {"schema": _ERROR}}
    return {
        "200": _answer("A page", _PAGE) if schema is None else _object(schema),
        "400": _answer("A request that is none, or a mesh that is none", refusal | _TEXT),
        "404": _answer("There is no such checkpoint, or no such step", refusal),
        "422": _answer("The checkpoint cannot be read; the text says why", refusal),
        "503": _answer("Others are being read: try again", refusal),
        "504": _answer("It took too long", refusal),
    }


_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _only(
    method: str,
    summary: str,
    answers: dict[str, Any],
    parameters: list[dict[str, Any]] | None = None,
    *,
    is_open: bool = False,
    changes: bool = False,
) -> dict[str, Any]:
    """Return a path with one operation. What all of them may answer is added: a wrong request, and no right to ask."""
    refusals = {
        "400": _answer("A request that is none, or with a body", _TEXT),
        "421": _answer("Not a name of this machine", _TEXT),
        "429": _answer("This client sends too many requests", _TEXT),
    }
    if not is_open:
        refusals["401"] = _answer("A token is needed: to a browser, as a form that takes one", _TEXT | _PAGE)
    if changes:
        refusals["403"] = _answer("A browser asks for a page of another site", _TEXT)
    operation = {"summary": summary, "responses": refusals | answers}
    if is_open:
        operation["security"] = []
    return {method: operation} | ({"parameters": parameters} if parameters else {})
