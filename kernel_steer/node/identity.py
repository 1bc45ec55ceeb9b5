"""What makes the answers of two nodes one answer: the same weights, the same tokenizer, the same chat template.

An adapter says so itself, in its model card. An engine that speaks the dialect without knowing of us (vLLM, SGLang)
is asked for a few tokens, as a gateway would ask it: so it is the running engine that is judged and not its
configuration. The tokenizer's file, which no such engine hands out, is read from where the engine has it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kernel_steer.admission import REASONING, Resume
from kernel_steer.node.models import file_sha256
from kernel_steer.node.revision import revision_of

# What an answer can be asked for beyond plain sampling. A pool promises what all of its nodes can do.
ENGINES: dict[str, frozenset[str]] = {
    "vllm": frozenset({"ids", "guided", "logprobs", "min_tokens", "tools"}),
    "sglang": frozenset({"ids", "guided", "logprobs", "min_tokens", "tools"}),
}
_REASONING_TOKENS = 16  # a model that thinks begins with it; a parser needs a few to say so
_PROBE_TIMEOUT_S = 60.0  # the first token of a fresh engine may be waiting for its kernels
_PROBE_TEXT = "Hello, wörld: 日本語 😀\n\tx = [1, 2.5]; naïve"
PROBE_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 😀"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?"},
)
# Templates write today's date; that makes no other template of them.
_DATE_WORDS = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b|\d+"
)


class IdentityUnknown(RuntimeError):
    """The node cannot be let into a pool; the message says what to set or change."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`revision`, `tokenizer_id` and `template_id` are compared, each as a whole; the last is empty for a model
    that has no chat template. `tokenizer` is the file, where it must be published for gateways."""

    engine: str
    revision: str
    tokenizer_id: str
    template_id: str
    capabilities: frozenset[str]
    tokenizer: Path | None = None


class Engine:
    """The HTTP side of a running engine, for blocking callers. Raises OSError and http.client.HTTPException."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def get(self, path: str) -> tuple[int, Any]:
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, None


def identify(
    engine: Engine,
    *,
    model: str,
    tokenizer: str = "",
    revision: str = "",
    resume: Resume = Resume.IDS,
    reasoning: bool = False,
) -> Identity:
    """Takes a second or two, more on an engine's first call. `tokenizer` and `revision` are what staff set, if
    anything; a `resume` other than by ids is their word for a server that is asked for nothing more, `reasoning`
    that for a model that does not think about a greeting.
    Raises IdentityUnknown; OSError and HTTPException when the engine does not answer."""
    card = _card(engine, model)
    if resume is not Resume.IDS:
        return Identity(str(card.get("owned_by", "")), revision, "", "", frozenset({resume.value}))
    if "tokenizer_id" in card:
        return Identity(
            engine=str(card.get("owned_by", "adapter")),
            revision=revision or str(card.get("revision", "")),
            tokenizer_id=str(card["tokenizer_id"]),
            template_id=str(card.get("template_id", "")),
            capabilities=frozenset(card.get("capabilities", ())),
        )
    kind = str(card.get("owned_by", ""))
    if kind not in ENGINES:
        raise IdentityUnknown(
            f"its engine {kind!r} is none of {', '.join(sorted(ENGINES))}, nor an adapter: "
            "set APEX_NODE_RESUME to text or none for a server without ids"
        )
    root = str(card.get("root") or "")
    path = find_tokenizer(tokenizer or root)
    folder = Path(root) if Path(root).is_dir() else path.parent
    prompt, reasons = _probe(engine, model, path)
    _, version = engine.get("/version")
    number = version.get("version", "") if isinstance(version, dict) else ""
    return Identity(
        engine=f"{kind} {number}".strip(),
        revision=revision or revision_of(folder),
        tokenizer_id=file_sha256(path),
        template_id=template_id(prompt) if prompt else "",
        capabilities=ENGINES[kind] | ({REASONING} if reasons or reasoning else set()),
        tokenizer=path,
    )


def _card(engine: Engine, model: str) -> dict[str, Any]:
    status, body = engine.get("/v1/models")
    try:
        cards = {card["id"]: card for card in body["data"]}
    except (TypeError, KeyError, AttributeError):
        raise IdentityUnknown(f"GET /v1/models is no list of models (status {status})") from None
    if model not in cards:
        raise IdentityUnknown(f"it serves {', '.join(map(repr, cards)) or 'nothing'}, not {model!r}")
    card: dict[str, Any] = cards[model]
    return card


def find_tokenizer(root: str) -> Path:
    """tokenizer.json of a file, a folder or a name in the Hugging Face cache. Raises IdentityUnknown."""
    given = Path(root)
    candidates = [given, given / "tokenizer.json", *_cached(root)]
    for path in candidates:
        if path.name.endswith(".json") and path.is_file():
            return path
    raise IdentityUnknown(
        f"no tokenizer.json for {root!r} on this machine: set APEX_NODE_TOKENIZER to the file or its folder"
    )


def _cached(repository: str) -> list[Path]:
    """Where the hub's client keeps it: models--ORG--NAME/snapshots/COMMIT, with refs/main naming the commit."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        return []
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = hub / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return []
    return [folder / "snapshots" / commit / "tokenizer.json"]


def _probe(engine: Engine, model: str, path: Path) -> tuple[str, bool]:
    """Two answers of one token and a short chat. Returns what the chat template makes of PROBE_CHAT, nothing without
    a template, and whether the engine parts thoughts from the answer."""
    tokenizer = Tokenizer.from_file(str(path))
    ask = {"model": model, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    read = _prompt_ids(engine.post("/v1/completions", ask | {"prompt": _PROBE_TEXT}))
    if read not in (
        tokenizer.encode(_PROBE_TEXT, add_special_tokens=special).ids for special in (True, False)
    ):
        raise IdentityUnknown(
            f"{path} is not the tokenizer of the running engine, which reads text as other ids"
        )
    if _prompt_ids(engine.post("/v1/completions", ask | {"prompt": read})) != read:
        raise IdentityUnknown("its engine does not read a prompt of ids as it is given")
    chat = ask | {"messages": list(PROBE_CHAT), "max_tokens": _REASONING_TOKENS}
    status, answer = engine.post("/v1/chat/completions", chat)
    if status == 400:
        return "", False
    prompt = tokenizer.decode(_prompt_ids((status, answer)), skip_special_tokens=False)
    said = answer["choices"][0].get("message") or {}
    # vLLM's name of it from 0.11 on, and the one before, which SGLang has too.
    return prompt, bool(said.get("reasoning") or said.get("reasoning_content"))


def _prompt_ids(answer: tuple[int, Any]) -> list[int]:
    status, body = answer
    if status != 200 or not isinstance(body, dict):
        raise IdentityUnknown(f"a request for one token is answered with status {status}")
    choice = (body.get("choices") or [{}])[0]
    ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not isinstance(choice.get("token_ids"), list):
        raise IdentityUnknown("its answers name no token ids (return_token_ids): a newer engine is needed")
    return ids


def template_id(text: str) -> str:
    """Of what the template makes of PROBE_CHAT, dates aside: so an override on the command line is seen too."""
    return hashlib.sha256(_DATE_WORDS.sub("#", text).encode()).hexdigest()
