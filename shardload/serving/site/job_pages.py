"""The page of jobs, and the forms that start and cancel them: the same as `jobs.requests` does for programs.

/ui/jobs    what runs and waits, then what has ended, the latest first
            POST kind=verify&checkpoint=NAME, or cancel=ID ─► 303 to the page
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import cast
from urllib.parse import quote

from aiohttp import web

from shardload.reports.markup import escaped, escaped_lines
from shardload.serving.jobs.queue import Jobs
from shardload.serving.jobs.records import JOB_KINDS, Job, JobKind
from shardload.serving.jobs.requests import JOBS_PATH, JobRequests
from shardload.serving.limits import client_of
from shardload.serving.site.forms import form_fields
from shardload.serving.site.pages import JOBS_PAGE, answer, checkpoint_path, moment, page
from shardload.units import format_bytes, format_seconds, plural

_MOST_ENDED = 50
"""Most jobs that have ended on the page: a browser asks for it each second."""
_MOST_LINES = 10
"""Most problems and notes of a job on the page."""


class JobPages:
    """Answers requests for the page of jobs."""

    def __init__(self, jobs: Jobs, requests: JobRequests) -> None:
        self._jobs, self._requests = jobs, requests

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the address of the page."""
        router.add_get(JOBS_PAGE, self._page)
        router.add_post(JOBS_PAGE, self._posted)

    async def _page(self, request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(lambda: jobs_page(self._jobs.all())))

    async def _posted(self, request: web.Request) -> web.Response:
        fields = await form_fields(request)
        try:
            if "cancel" in fields:
                await self._requests.cancel(fields["cancel"])
            else:
                await self._started(fields, client_of(request.remote or ""))
        except web.HTTPException as error:
            lines = [
                f'<p class="refusal" role="alert">{escaped_lines((error.text or "").strip())}</p>',
                f'<p><a href="{JOBS_PAGE}">All jobs</a></p>',
            ]
            return answer(page("Jobs", lines, here=JOBS_PAGE, scripts=()), status=error.status)
        return web.Response(status=303, headers={"Location": JOBS_PAGE, "Cache-Control": "no-store"})

    async def _started(self, fields: Mapping[str, str], client: str) -> None:
        kind, checkpoint = fields.get("kind"), fields.get("checkpoint")
        if kind not in JOB_KINDS or checkpoint is None:
            raise web.HTTPBadRequest(text=f"The form must have a checkpoint, and a kind: {' or '.join(JOB_KINDS)}.\n")
        await self._requests.take(cast("JobKind", kind), checkpoint, client=client)


def job_form(choices: Mapping[str, str], *, kinds: tuple[str, ...] = JOB_KINDS) -> str:
    """Return the form that starts a job; ``choices`` are names of checkpoints, each with what a person calls it."""
    (first, _), *others = choices.items()
    if others:
        options = "".join(f'<option value="{escaped(name)}">{escaped(text)}</option>' for name, text in choices.items())
        chosen = f'<label>Part <select name="checkpoint">{options}</select></label>'
    else:
        chosen = f'<input type="hidden" name="checkpoint" value="{escaped(first)}">'
    buttons = " ".join(
        f'<button class="button" name="kind" value="{kind}">{kind.capitalize()}'
        f'<span class="hidden"> {escaped(first) if not others else "this part"}</span></button>'
        for kind in kinds
    )
    return f'<form class="actions" method="post" action="{JOBS_PAGE}">{chosen} {buttons}</form>'


def jobs_page(jobs: list[Job]) -> str:
    """Return the page of jobs, which are as `Jobs.all` has them: the oldest first."""
    unfinished = [job for job in jobs if not job.is_over]
    ended = sorted((job for job in jobs if job.is_over), key=lambda job: job.ended_s or 0.0, reverse=True)

    def items(shown: list[Job]) -> Iterator[str]:
        yield '<ul class="loads">'
        yield from (_item(job, checkpoint_path(job.checkpoint)) for job in shown)
        yield "</ul>"

    lines = ["<div data-live>", '<h2 class="hidden">Now</h2>', *items(unfinished)]
    if not unfinished:
        lines.append("<p>No job runs or waits. The page of a checkpoint has buttons that start one.</p>")
    if ended:
        lines += ["<h2>Ended</h2>", *items(ended[:_MOST_ENDED])]
    if len(ended) > _MOST_ENDED:
        rest = plural(len(ended) - _MOST_ENDED, "older job")
        lines.append(f'<p class="soft">{rest} are not shown: <a href="{JOBS_PATH}">{JOBS_PATH}</a> lists all.</p>')
    lines += ["</div>", '<noscript><p class="soft">Reload the page to see what has changed.</p></noscript>']
    meaning = (
        "Verify reads all bytes and compares them with digests. Prefetch reads them into the page cache, or from "
        "their address into the server\u2019s cache, for the loads that follow. One job runs at a time."
    )
    lines.append(f'<p class="soft">{meaning}</p>')
    return page("Jobs", lines, here=JOBS_PAGE)


def _item(job: Job, path: str) -> str:
    name, kind = escaped(job.checkpoint), job.kind.capitalize()
    of = f"{format_bytes(job.done_bytes)} of {format_bytes(job.total_bytes)}"
    # A job that is done has passed over the few bytes that need no check.
    facts = [
        format_bytes(job.total_bytes) if job.state == "done" else of,
        f"asked for at {moment(job.created_s)}",
    ]
    if job.ended_s is not None:
        facts.append(f"ended after {format_seconds(max(0.0, job.ended_s - job.created_s))}")
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    return (
        f'<li id="job-{escaped(job.id)}"><a class="name" href="{escaped(path)}">{kind} {name}</a>'
        f'<span class="client">{job.state}</span>{_bar(job, f"{kind} {name}", of)}'
        f'<span class="facts-line">{spans}</span>{_result(job)}{_cancel(job, f"{kind} {name}")}</li>'
    )


def _bar(job: Job, label: str, of: str) -> str:
    if job.is_over:
        return ""
    most = max(job.total_bytes, 1)
    return f'<progress max="{most}" value="{min(job.done_bytes, most)}" aria-label="{label}">{of}</progress>'


def _cancel(job: Job, label: str) -> str:
    if job.is_over:
        return ""
    return (
        f'<form method="post" action="{JOBS_PAGE}"><button class="button" name="cancel" value="{escaped(job.id)}">'
        f'Cancel<span class="hidden"> {label}</span></button></form>'
    )


def _result(job: Job) -> str:
    """Return what a job found, or why it failed."""
    found = job.result or {}
    texts = [text for text in (found.get("verdict"), found.get("problem")) if text]
    texts += [*found.get("problems", ()), *found.get("notes", ())]
    lines = [f"<li>{escaped_lines(text)}</li>" for text in texts[:_MOST_LINES]]
    if len(texts) > _MOST_LINES:
        lines.append(f"<li>and {plural(len(texts) - _MOST_LINES, 'more line')}: {_link(f'{JOBS_PATH}/{job.id}')}</li>")
    return f'<ul class="result {"bad" if _is_bad(job) else ""}">{"".join(lines)}</ul>' if lines else ""


def _is_bad(job: Job) -> bool:
    return job.state == "failed" or (job.result or {}).get("verdict") == "damaged"


def _link(path: str) -> str:
    return f'<a href="{quote(path)}">{escaped(path)}</a>'
