"""The Celery application: `celery -A apex worker`. With APEX_NODE_NAME set, that worker is a node's."""

import os
from urllib.parse import urlsplit

from celery import Celery

from apex.env import Env

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apex.settings")

app = Celery("apex")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


def _add_node_worker() -> None:
    """Reads what this machine serves (docs/nodes.md). A malformed value ends the start with a clear line."""
    from brokerage.node_worker import NodeConfig, node_step
    from kernel_steer.admission import Resume
    from kernel_steer.listener.providers import NO_PROVIDER, SOURCES

    env = Env()
    engine = env.text("APEX_NODE_ENGINE", "llamacpp")
    host = env.text("APEX_NODE_HOST", "127.0.0.1")
    port = env.integer("APEX_NODE_PORT", 8200, low=1, high=65535)
    urls: dict[str, str] = {}
    if engine != "llamacpp":
        kind, _, url = engine.partition(":")
        parts = urlsplit(url)
        if (
            kind not in ("url", "tgi")
            or parts.scheme != "http"
            or not parts.hostname
            or parts.path.strip("/")
        ):
            env.problems.append(
                "APEX_NODE_ENGINE must be llamacpp, url:http://host:port or tgi:http://host:port"
            )
        elif kind == "url":
            host, port = parts.hostname, parts.port or 80
        urls[kind] = url
    config = NodeConfig(
        name=env.text("APEX_NODE_NAME"),
        host=host,
        port=port,
        model=env.text("APEX_NODE_MODEL", "gemma-3-270m"),
        slots=env.integer("APEX_NODE_SLOTS", 8, low=1, high=1024),
        context=env.integer("APEX_NODE_CONTEXT", 2048, low=256, high=1 << 20),
        engine_url=urls.get("url"),
        tgi_url=urls.get("tgi"),
        provider=env.choice("APEX_NODE_PROVIDER", "aws", [*SOURCES, NO_PROVIDER]),
        tokenizer=env.text("APEX_NODE_TOKENIZER", ""),
        revision=env.text("APEX_NODE_REVISION", ""),
        resume=Resume(env.choice("APEX_NODE_RESUME", "ids", list(Resume))),
        reasoning=env.boolean("APEX_NODE_REASONING", False),
    )
    env.finish()
    app.steps["worker"].add(node_step(config))


if os.environ.get("APEX_NODE_NAME", "").strip():
    _add_node_worker()
