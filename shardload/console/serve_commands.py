"""The command that serves checkpoints to other processes and machines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardload.console import options, streams
from shardload.console.request_log import RequestLog, json_line, text_line
from shardload.errors import MissingExtraError
from shardload.stores.cache_choice import current_cache

_Root = Annotated[
    list[str] | None,
    typer.Option(
        "--root",
        metavar="DIR_OR_URL",
        help="Folder with checkpoints, or a checkpoint; or its address: s3://, gs://, http(s)://, hf://. May be "
        "repeated.",
        show_default=False,
    ),
]
_Run = Annotated[
    list[Path] | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Folder of a training run, even without a step. May be repeated.",
        show_default=False,
    ),
]
_Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; only here without a token.")
]
_TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="File with tokens, one a line; clients need one of them."),
]
_Certificate = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificates (PEM), so that clients use https.")
]
_Key = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Key of the certificate, if it is in a file of its own."),
]
_MostConnections = Annotated[
    int, typer.Option("--max-connections", metavar="N", min=1, help="Most connections; more are closed at once.")
]
_ClientConnections = Annotated[
    int | None,
    typer.Option(
        "--client-connections",
        metavar="N",
        min=1,
        help="Most of them for one client; by default half.",
        show_default=False,
    ),
]
_ClientRequests = Annotated[
    int | None,
    typer.Option(
        "--client-requests",
        metavar="N",
        min=1,
        help="Most requests a second of one client; by default any number.",
        show_default=False,
    ),
]
_HandOver = Annotated[
    bool,
    typer.Option("--hand-over/--no-hand-over", help="Let clients on this machine read the files, not a connection."),
]
_Grace = Annotated[
    float,
    typer.Option("--grace", metavar="SECONDS", min=0.0, help="How long what is being sent at the end may still take."),
]
_State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Folder for jobs and digests, so that they survive a restart."),
]
_UntilStdin = Annotated[
    bool, typer.Option("--until-stdin-closes", help="End with standard input: a pipe from the process that starts it.")
]
_Peer = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="URL",
        help="Another server of the same addresses, which is asked for what is missing here. May be repeated.",
        show_default=False,
    ),
]
_Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME",
        help="Checkpoint at an address that the cache keeps, however full it is. May be repeated.",
        show_default=False,
    ),
]
_RequestLog = Annotated[
    bool, typer.Option("--log-json", help="Log requests and all else on stderr as one JSON object a line, not as text.")
]


def serve(
    *,
    root: _Root = None,
    run: _Run = None,
    listen: _Listen = "127.0.0.1:8600",
    token_file: _TokenFile = None,
    tls_cert: _Certificate = None,
    tls_key: _Key = None,
    max_connections: _MostConnections = 1024,
    client_connections: _ClientConnections = None,
    client_requests: _ClientRequests = None,
    hand_over: _HandOver = True,
    grace: _Grace = 30.0,
    state: _State = None,
    until_stdin_closes: _UntilStdin = False,
    log_json: _RequestLog = False,
    cache: options.CacheOption = None,
    cache_size: options.CacheSizeOption = None,
    peer: _Peer = None,
    pin: _Pin = None,
) -> None:
    """Serve checkpoints over HTTP to other processes and machines.

    A checkpoint's address is that of the server with its path below the folder: http://host:8600/gemma2_9b. Only files
    of checkpoints are served. What is at other addresses is fetched once, and kept in the folder of --cache. Each
    request is logged on stderr. SIGINT or SIGTERM finishes what is being sent.

    Examples:
    $ shardload serve --root /mnt/models

    $ shardload serve --root /mnt/models --listen 0.0.0.0:8600 --token-file tokens --tls-cert cert.pem --tls-key key.pem

    $ shardload serve --root s3://bucket/models --cache /mnt/nvme/shardload --cache-size 500GiB
    """
    if not root and not run:
        raise typer.BadParameter("name at least one folder.", param_hint="--root")
    with options.use_cache(cache, cache_size), streams.results() as out:
        try:
            from shardload.serving.rack.cache_contents import pin as pin_in_cache
            from shardload.serving.roots.catalogue import Catalogue
            from shardload.serving.roots.remote_roots import AddressRoot, RemoteCatalogue
            from shardload.serving.roots.scanning import summary
            from shardload.serving.server import Listening, read_tokens, serve
        except ImportError as error:
            raise MissingExtraError.explaining(error, needed_for="shardload serve") from error
        from shardload.resolve import is_read_in_place, place_in_store

        tokens = () if token_file is None else read_tokens(token_file)
        listening = Listening.parse(
            listen,
            certificate=tls_cert,
            key=tls_key,
            most_connections=max_connections,
            client_connections=client_connections,
            requests_per_s=client_requests,
            hands_over=hand_over,
            grace_s=grace,
            until_stdin_closes=until_stdin_closes,
        )
        log = RequestLog(json_line if log_json else text_line)
        try:
            if tokens and not listening.is_local and tls_cert is None:
                log.note({"note": "without --tls-cert, tokens and weights are sent unencrypted"})
            own = [each for each in root or () if not is_read_in_place(each)]
            remote = [AddressRoot(partial(place_in_store, each)) for each in root or () if is_read_in_place(each)]
            catalogue = Catalogue(own, runs=run or (), may_be_empty=bool(remote))
            addresses = RemoteCatalogue(remote, taken=catalogue.names("") or {})
            cache_used = current_cache() if addresses.roots else None
            for name in pin_in_cache(pin or (), addresses, cache_used):
                log.note({"note": f"{name} is pinned once an address has a checkpoint of this name"})
            for line in (*catalogue.left_out(), *addresses.left_out()):
                log.note({"note": line})
            for problem in addresses.problems():
                text = f"{problem.rstrip('.')}. The server starts without what is there, and tries again"
                log.note({"note": text})
            served = summary((*catalogue.checkpoints(), *addresses.checkpoints()))
            with log.taking_all():
                serve(
                    catalogue,
                    listening,
                    tokens=tokens,
                    state=state,
                    log=log.note,
                    started=lambda address: out.text(f"{served} at {address}\n"),
                    addresses=addresses,
                    cache=cache_used,
                    peers=tuple(peer or ()),
                )
        finally:
            log.close()
