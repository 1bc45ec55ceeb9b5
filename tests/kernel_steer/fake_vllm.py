"""As much of vLLM (and, by `owned_by`, of SGLang) as a node worker talks to, with a real tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


@dataclass
class FakeVllm:
    root: Path  # the model's folder, with tokenizer.json
    model: str = "tiny"
    owned_by: str = "vllm"
    version: str = "0.32.0"
    template: str | None = "<{role}>{content}"  # of each message; None for a model without a chat template
    thinks_as: str = ""  # the field that a reasoning parser puts thoughts into; empty for none
    # Faults.
    names_ids: bool = True
    keeps_ids: bool = True
    reads_as: Path | None = None  # another tokenizer than the one in the folder
    asked: list[str] = field(default_factory=list)
    port: int = 0

    @contextmanager
    def running(self) -> Iterator[FakeVllm]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(*fake.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._say(*fake.post(self.path, body))

            def _say(self, status: int, body: Any) -> None:
                fake.asked.append(self.path)
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            return 200, None
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": self.owned_by, "root": str(self.root)}
            return 200, {"object": "list", "data": [card | {"parent": None, "max_model_len": 2048}]}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        tokenizer = Tokenizer.from_file(str(self.reads_as or self.root / "tokenizer.json"))
        chat = path == "/v1/chat/completions"
        if chat:
            if self.template is None:
                return 400, {"error": {"message": "no chat template"}}
            text = "".join(self.template.format(**message) for message in body["messages"])
        prompt = text if chat else body["prompt"]
        ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt).ids
        if isinstance(prompt, list) and not self.keeps_ids:
            ids = [0, *ids]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        answer: dict[str, Any] = {"id": "x", "choices": [choice]}
        if self.names_ids and body.get("return_token_ids"):
            choice["token_ids"] = [5]
            (answer if chat else choice)["prompt_token_ids"] = ids
        if chat:
            thoughts = {self.thinks_as: "Okay,"} if self.thinks_as else {}
            choice["message"] = {"role": "assistant", "content": None if thoughts else "Fine."} | thoughts
        return 200, answer
