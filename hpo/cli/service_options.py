"""Holds the options of commands that run for long: how they wait, log and are watched."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.errors import UserError
from trainer.quote import quoted


def _log_as(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Makes the whole command log in this format, up to the error that ends it."""
    if value == "json":
        from hpo.event_log import json_lines

        ctx.find_root().with_resource(json_lines(str(ctx.info_name)))
    elif value != "text":
        raise UserError(field=str(param.name), value=quoted(value), fix="give text or json")
    return value


OutageOption = Annotated[
    str | None,
    typer.Option(
        "--outage-wait",
        metavar="15m|SECONDS",
        envvar="HPO_OUTAGE_WAIT",
        help="How long to wait for a ledger or a bucket that does not answer.  [default: 15m]",
    ),
]
LogFormatOption = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        envvar="HPO_LOG_FORMAT",
        help="With json, print each event as a line of JSON on standard error.",
        callback=_log_as,
    ),
]
ProbesOption = Annotated[
    str | None,
    typer.Option("--probes", metavar="[HOST:]PORT", help="Answer /healthz and /readyz there, without a token."),
]
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", metavar="[HOST:]PORT", help="Answer /metrics there, with the token in metrics.token."),
]
