"""Streams of a known length through a gateway or a load balancer, in threads of their own."""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai

from endpoint_stand_in import MODEL

TEXT = "the answer ends with this word: end"


class Streams:
    """`count` chats whose model writes `text`, each in a thread."""

    def __init__(self, url: str, key: str, count: int, *, text: str = TEXT, verify: Any = True) -> None:
        self._client = openai.OpenAI(
            api_key=key, base_url=f"{url}/v1", max_retries=0, timeout=120, http_client=httpx.Client(verify=verify)
        )
        self._text = text
        self._pool = ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self._begun = 0
        self._answers: list[Future[str]] = [self._pool.submit(self._answer) for _ in range(count)]

    def _answer(self) -> str:
        """The whole text, or what went wrong."""
        parts: list[str] = []
        messages: Iterable[Mapping[str, str]] = [{"role": "user", "content": f"SAY<<{self._text}>>"}]
        try:
            stream = self._client.chat.completions.create(model=MODEL, messages=messages, stream=True)  # type: ignore[call-overload]
            for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else ""
                if text and not "".join(parts):
                    with self._lock:
                        self._begun += 1
                parts.append(text or "")
        except (openai.OpenAIError, httpx.HTTPError) as error:
            return f"{''.join(parts)!r} and then {error!r}"
        return "".join(parts)

    def begun(self) -> bool:
        """Whether all have sent text. Fails with the first that ended without."""
        ended = [answer.result() for answer in self._answers if answer.done()]
        assert [answer for answer in ended if answer != self._text] == []
        return self._begun == len(self._answers)

    def failed(self, timeout_s: float = 60.0) -> list[str]:
        """Wait for the ends; what is not the whole text."""
        answers = [answer.result(timeout_s) for answer in self._answers]
        self._pool.shutdown()
        self._client.close()
        return [answer for answer in answers if answer != self._text]
