"""Third parties' APIs: added, changed and tried by staff."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import uuid
from dataclasses import dataclass
from decimal import Decimal
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from brokerage.models import Node, ServedModel, Upstream
from brokerage.services.audit import record
from brokerage.services.secrets import seal, unseal
from kernel_steer import admission
from kernel_steer.resume.leg import LegFailed, LegRefused, Mode
from kernel_steer.upstream.connection import tls
from kernel_steer.upstream.legs import Upstreams

_PATH = re.compile(r"(?:/[\w.~-]+)*", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]*")
_TRY_S = 20.0
# Of what a trial asks; it is left at the head of the answer, so it costs a few tokens at most.
_QUESTION = {"messages": [{"role": "user", "content": "Reply with: ok"}], "stream": True}


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """What staff say of an API. `api_key` None keeps the one that is stored, empty is none."""

    base_url: str
    model: str
    api_key: str | None = None
    ca_pem: str = ""
    resume: str = Upstream.Resume.NONE
    slots: int = 64
    hourly_rate: Decimal = Decimal(0)


@transaction.atomic
def add_upstream(
    *, name: str, served_model: ServedModel, provider: str, wanted: UpstreamSettings, actor: User | str
) -> Upstream:
    """A node that is ready at once. Raises ValidationError, by field."""
    check_settings(wanted)
    _claim_pool(served_model, wanted.resume)
    try:
        with transaction.atomic():
            node = Node.objects.create(name=name, served_model=served_model, provider=provider)
    except IntegrityError:
        raise ValidationError({"name": f"There is a node of the name {name!r} already."}) from None
    upstream = Upstream(node=node)
    _store(upstream, wanted)
    _record("upstream.added", upstream, actor)
    return upstream


@transaction.atomic
def change_upstream(*, upstream: Upstream, wanted: UpstreamSettings, actor: User | str) -> None:
    """From now on so; it is in use again, whatever it was. Answers under way end as they began.
    Raises ValidationError, by field."""
    check_settings(wanted)
    _claim_pool(upstream.node.served_model, wanted.resume, but_for=upstream.node)
    _store(upstream, wanted)
    _record("upstream.changed", upstream, actor)


def check_settings(wanted: UpstreamSettings) -> None:
    """Raises ValidationError, by field."""
    errors: dict[str, str] = {}
    try:
        address_of(wanted.base_url)
    except ValueError as error:
        errors["base_url"] = str(error)
    if not _KEY.fullmatch(wanted.api_key or ""):
        errors["api_key"] = "A key has no blanks, line breaks or letters beyond ASCII: copy it again."
    if wanted.ca_pem:
        try:
            tls(wanted.ca_pem)
        except (ssl.SSLError, ValueError):
            errors["ca_pem"] = "This is no certificate in PEM (-----BEGIN CERTIFICATE----- ...)."
    if errors:
        raise ValidationError(errors)  # type: ignore[arg-type]


def address_of(base_url: str) -> tuple[str, int, str]:
    """Host, port and path. Raises ValueError with what would be right."""
    parts = urlsplit(base_url.strip())
    port = parts.port
    if parts.scheme != "https":
        raise ValueError("It must begin with https:// (a server without TLS is a node with a worker).")
    if not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "It is host and path alone, such as https://api.example.com/v1; the key has its field."
        )
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path):
        raise ValueError("Its path may have letters, digits and . _ ~ - between slashes.")
    if path.endswith("/completions"):
        raise ValueError("It is what stands before /chat/completions.")
    try:
        host = parts.hostname.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError("Its host is no valid name.") from None
    return host, port or 443, path


def as_node(
    *, name: str, epoch: int, base_url: str, model: str, api_key: str, ca_pem: str, resume: str
) -> admission.Node:
    """As gateways see it."""
    host, port, path = address_of(base_url)
    networks = tuple(settings.UPSTREAM_PRIVATE_NETWORKS)
    upstream = admission.Upstream(path, model, api_key, ca_pem, networks)
    return admission.Node(name, epoch, host, port, resume=admission.Resume(resume), upstream=upstream)


def try_upstream(*, wanted: UpstreamSettings, stored: Upstream | None = None) -> None:
    """Asks it for an answer as a gateway would, from here. Raises ValidationError, by field."""
    check_settings(wanted)
    key = wanted.api_key
    if key is None:
        key = unseal(stored.sealed_key) if stored is not None and stored.sealed_key else ""
    node = as_node(
        name="trial",
        epoch=0,
        base_url=wanted.base_url,
        model=wanted.model,
        api_key=key,
        ca_pem=wanted.ca_pem,
        resume=wanted.resume,
    )
    try:
        asyncio.run(_try(node))
    except LegRefused as error:
        raise ValidationError({"model": f"It answers {error.status}: {error.message}"}) from None
    except LegFailed as error:
        field = {401: "api_key", 402: "api_key", 403: "api_key", 404: "model"}.get(
            error.status or 0, "base_url"
        )
        hint = " Is the path right, and the model's name?" if error.status == 404 else ""
        raise ValidationError({field: f"Not connected: {error}.{hint}"}) from None


async def _try(node: admission.Node) -> None:
    assert node.upstream is not None
    upstreams = Upstreams()
    try:
        leg = await upstreams.open_leg(
            number=1,
            node=node,
            mode=Mode.FRESH,
            path="/v1/chat/completions",
            body=_QUESTION | {"model": node.upstream.model},
            request_id=str(uuid.uuid4()),
            timeout_s=_TRY_S,
            watch=None,
        )
        leg.sock.close()
    finally:
        upstreams.close()


def _claim_pool(served_model: ServedModel, resume: str, *, but_for: Node | None = None) -> None:
    """Nodes of a pool go on with answers in one way. The first node decides which; alone it may decide anew."""
    pool = ServedModel.objects.select_for_update().get(pk=served_model.pk)
    others = pool.nodes.exclude(pk=but_for.pk) if but_for else pool.nodes.all()
    if pool.capabilities == [resume]:
        return
    if pool.capabilities and (others.exists() or but_for is None):
        raise ValidationError(
            {
                "resume" if but_for else "served_model": f"The nodes of {pool} can be asked for "
                f"{', '.join(pool.capabilities)}, and this one would go on with a cut answer: {resume}. "
                "Publish a model of another name for it."
            }
        )
    ServedModel.objects.filter(pk=pool.pk).update(capabilities=[resume])


def _store(upstream: Upstream, wanted: UpstreamSettings) -> None:
    host, port, _ = address_of(wanted.base_url)
    upstream.base_url, upstream.model = wanted.base_url.strip(), wanted.model
    upstream.ca_pem, upstream.resume = wanted.ca_pem, wanted.resume
    if wanted.api_key is not None:
        upstream.sealed_key = seal(wanted.api_key) if wanted.api_key else ""
        # Of a short one that would be too much of it.
        upstream.key_ending = wanted.api_key[-4:] if len(wanted.api_key) >= 16 else ""
    upstream.save()
    # A new epoch: what gateways held against it is over. Nobody reports for it, so it is never silent.
    Node.objects.filter(pk=upstream.pk).update(
        host=host,
        port=port,
        epoch=time.time_ns() // 1_000_000,
        state=Node.State.READY,
        state_reason="",
        engine="third party",
        slots=wanted.slots,
        hourly_rate=wanted.hourly_rate,
        capabilities=[wanted.resume],
    )
    upstream.node.refresh_from_db()


def _record(action: str, upstream: Upstream, actor: User | str) -> None:
    record(
        action,
        subject=upstream,
        actor=actor,
        name=upstream.node.name,
        base_url=upstream.base_url,
        model=upstream.model,
        resume=upstream.resume,
        key_ending=upstream.key_ending,
    )
