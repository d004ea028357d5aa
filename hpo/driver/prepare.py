"""Prepares a run: reads the study once, plans it, and checks the plan against this host, the data and a measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace

from hpo.declaration import folds, preflight
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver import lane_width
from hpo.driver.executor_options import decides
from hpo.driver.plan import RunPlan, plan, replanned
from hpo.driver.request import RunRequest
from hpo.driver.resolve import begun_declaration, check_names, configured
from hpo.driver.stored import declaration, read_study, with_lessons
from hpo.errors import NoLedger, UserError
from hpo.ledger import Ledger
from hpo.space.config import flatten
from hpo.storage import locations
from hpo.tracking.mlflow.client import check_trust
from hpo.tracking.uri import check_uri
from hpo.workers.executors.placement import Placement, elsewhere
from hpo.workers.prepared import Prepared


def prepare(request: RunRequest, prepared: Prepared | None, ends: ExitStack) -> tuple[RunPlan, Ledger | None]:
    """Returns the plan of a run that can begin, and the ledger if it exists.

    `ends` closes what this starts. Writes nothing but the home's directory. Raises UserError if the run cannot begin.
    """
    placement = request.placement.with_defaults()
    prepared = _prepared(placement, prepared, ends)  # imports while the study is read, which may import as much
    ledger = _known(request)
    planned = planned_run(decides(placement.executor).narrowed(request), ledger)
    prepared = _unless_elsewhere(prepared, planned.placement)
    planned = _allowed(planned, prepared)
    study, spec = planned.resolved.study, planned.resolved.spec
    notices = filter(None, (_taken_out(planned.request.study.overrides, spec), _unseen(study)))
    return replace(planned, notices=(*planned.notices, *notices)), ledger


def planned_run(request: RunRequest, ledger: Ledger | None) -> RunPlan:
    """Returns the plan of a request. Raises UserError, before anything is written, if the request is not valid."""
    if request.notify.tracking_uri:
        check_uri(request.notify.tracking_uri)
    check_names(request.search)
    source = declaration(request, ledger)
    stored = read_study(ledger, request, source)
    declared = configured(request, stored, source or begun_declaration(stored))
    return plan(request, with_lessons(ledger, request, stored, declared.study), declared)


def _allowed(planned: RunPlan, prepared: Prepared | None) -> RunPlan:
    """Returns the plan after checking this host, the servers and the data, and measuring lanes; creates the home.

    Raises UserError if the study cannot run here.
    """
    request, placement, study = planned.request, planned.placement, planned.resolved.study
    checkpoints = locations.resolved_url(request.storage.checkpoints, planned.stored.row, placement.executor)
    placement.check(study)
    here, begun = not elsewhere(placement.executor), planned.stored.row is not None
    if not begun:  # training goes on without MLflow, so what a server becomes later stops no study
        check_trust(planned.options.tracking_uri)
    preflight.check(planned.resolved, options=request.study.one_by_one, here=here, begun=begun)
    data = study.check_data()
    request, short = (request, "") if begun else _with_folds_that_fit(request, planned.resolved)
    request.home.create()
    options = replace(planned.options, checkpoints=checkpoints, data=data, prepared=prepared)
    with_lanes, measured = lane_width.decided(request, planned.resolved, planned.stored.spec, placement, prepared)
    notice = "; ".join(filter(None, (short, measured)))
    return replanned(replace(planned, options=options), with_lanes, notice)


def _with_folds_that_fit(request: RunRequest, resolved: ResolvedStudy) -> tuple[RunRequest, str]:
    """Returns the request, and a notice if the confirming phase cannot use the folds that the study declares.

    The phase then has other seeds alone. Raises UserError for folds that the request asks for.
    """
    confirm = resolved.confirms
    if confirm is None or not confirm.by_fold or not (reason := folds.unfit(resolved.study)):
        return request, ""
    seeds = option("confirm", str(others := replace(confirm, by_fold=False)))
    if request.search.confirm is not None:
        raise UserError(f"{option('confirm', str(confirm))}: {reason} Or confirm under other seeds alone, by {seeds}.")
    search = replace(request.search, confirm=str(others))
    return replace(request, search=search), f"{seeds}: without folds, since {reason.partition(';')[0].rstrip('.')}"


def _known(request: RunRequest) -> Ledger | None:
    """Returns the ledger if it exists. Raises NoLedger if it does not and the request needs a stored study."""
    try:
        return Ledger(request.storage.url, create=False, upgrade=True)
    except NoLedger:
        if request.study.reference is None:
            raise
        return None


def _prepared(asked: Placement, begun: Prepared | None, ends: ExitStack) -> Prepared | None:
    """Returns the process that forks workers, closed by `ends`; None if workers are elsewhere or cannot be forked."""
    if begun is not None or asked.executor != "local" or not Prepared.possible():
        return _unless_elsewhere(begun, asked)
    return ends.enter_context(closing(Prepared()))


def _unless_elsewhere(prepared: Prepared | None, placement: Placement) -> Prepared | None:
    """Returns `prepared`, or closes it and returns None if this host has no workers after all."""
    if prepared is None or (placement.executor == "local" and placement.workers > 0):
        return prepared
    prepared.close()
    return None


def _taken_out(overrides: Mapping[str, object], spec: StudySpec) -> str:
    """Returns a notice about parameters that the user or a preset sets, so that they are not searched."""
    if not overrides or spec.listed:
        return ""
    declared = load(spec.reference)
    space = (declared if spec.tier is None else declared.upto(spec.tier)).space
    sentences: list[str] = []
    preset = overrides.get("preset")
    directly = {path: value for path, value in overrides.items() if path != "preset"}
    for source, values in (("this run", directly), (f"preset={preset}", declared.presets.get(str(preset), {}))):
        before, space = space, space.pinned(flatten(values))
        if taken := [path for path in before.dimensions if path not in space.dimensions]:
            are = "is" if len(taken) == 1 else "are"
            sentences.append(f"{source} sets {', '.join(taken)}, which {are} not searched")
            sentences += [
                f"{path}={json.dumps(spec.overrides[path])} is none of what would be searched, {dimension.span}"
                for path, dimension in before.dimensions.items()
                if path in taken and path in directly and not dimension.may_be(spec.overrides[path])
            ]
    return "\n".join(sentences)


def _unseen(study: Study) -> str:
    """Returns a notice about searched parameters for which a command has no placeholder."""
    command = getattr(study.task, "command", None)
    if not command or not (names := command.unseen(study.space.paths)):
        return ""
    variables = ", ".join(f"HPO_PARAM_{name.replace('.', '__')}" for name in names)
    return (
        f"{command.file}: the command has no place for {', '.join(names)}, so unless the program reads {variables}, no "
        f"trial differs by it: write {{{names[0]}}} or ${{args}} in the command."
    )
