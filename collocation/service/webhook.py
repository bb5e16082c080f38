"""The admission webhook of Kubernetes. It fails open: an object without a figure is admitted unchanged."""

import asyncio

from fastapi import APIRouter, Request, Response

from vramcast.collocation.adapters import admission
from vramcast.collocation.adapters.admission import Admission, Admitted
from vramcast.collocation.adapters.pod_resources import Figures
from vramcast.collocation.service.cluster_api import ClusterApi
from vramcast.collocation.service.engine import Engine
from vramcast.collocation.service.http import PROBLEMS, ParsedRoute, engine_of, parsed_body, reply
from vramcast.collocation.service.kubernetes_routes import BODY, reason_of, reservations_of
from vramcast.collocation.service.loaded_checkpoint import EstimatedJob, ObservedJob
from vramcast.collocation.service.parsing import PodRequest, ReviewPart, ReviewRequest
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

ANSWER_SECONDS = 1.5
"""Less than `timeoutSeconds` of the webhook's configuration, so that the user reads why there is no figure."""

router = APIRouter(route_class=ParsedRoute, responses=PROBLEMS)


@router.post("/k8s/mutate", openapi_extra=BODY)
async def mutate(request: Request) -> Response:
    """Answer an AdmissionReview: a patch writes the needs of its jobs into the object."""
    body: ReviewRequest = await parsed_body(request)
    changes = await asyncio.gather(*(_change(request, body.review, part) for part in body.parts))
    patch = [step for change in changes for step in change.patch]
    warnings = list(dict.fromkeys(change.warning for change in changes if change.warning))
    return reply(admission.review_reply(body.review.uid, patch, warnings))


async def _change(request: Request, review: Admission, part: ReviewPart) -> Admitted:
    """Return the change of a part; after any error only a warning."""
    settings = engine_of(request).settings
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            figures = await _figures(engine_of(request), part.pod)
            if figures is None:
                return Admitted([])
            change = admission.change_of(review, part.part, figures, settings.resource, settings.device_class)
            if change.template and not review.dry_run:
                await _api(request).make_template(review.namespace, change.template)
            return change
    except TimeoutError:
        return Admitted(
            [], warning=f"vramcast: expected a figure within {ANSWER_SECONDS} s, found none: create it again"
        )
    except Exception as error:
        return Admitted([], warning=f"vramcast: {reason_of(error)}")


async def _figures(engine: Engine, pod: PodRequest) -> Figures | None:
    """Return the figures of a pod's job; None if it has none."""
    if pod.need_mib is not None:
        return Figures(pod.need_mib)
    reservations = await reservations_of(engine, pod, {None})
    return _figures_of(reservations[None]) if reservations else None


def _figures_of(job: ObservedJob | EstimatedJob) -> Figures:
    estimate_mib = job.observed.peak_bytes / MIB if job.observed else None
    if estimate_mib is None and isinstance(job, EstimatedJob):
        estimate_mib = job.answer.estimate_mib
    return Figures(job.reservation_mib, estimate_mib, job.basis)


def _api(request: Request) -> ClusterApi:
    api: ClusterApi | None = request.app.state.cluster_api
    if api is None:
        raise UserError("expected a service with an account of the cluster, found none: write a ResourceClaim instead")
    return api
