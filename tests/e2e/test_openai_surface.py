"""LangChain with a whole stack and the language model that ships."""

from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from stack import Stack


async def test_langchain(tiny_stack: Stack) -> None:
    """Chat and its stream, several at once, completions, and embeddings with the option that the error names."""
    access = {"base_url": f"{tiny_stack.url}/v1", "api_key": tiny_stack.key("enterprise")}
    prompt = [("system", "Be brief."), ("human", "Once upon a time")]
    async with httpx.AsyncClient(timeout=30.0) as transport:  # LangChain would not close its own.
        options: dict[str, Any] = {"model": "tiny", "http_async_client": transport, **access}
        chat = ChatOpenAI(max_tokens=8, **options)
        embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
        message = await chat.ainvoke(prompt)
        several = await chat.abatch(["The sea", "The king", "The old man"])
        streamed = [chunk.content async for chunk in chat.astream(prompt)]
        completed = await OpenAI(max_tokens=8, **options).agenerate(["Once upon", "The sea"])
        vectors = await embeddings.aembed_documents(["The cat sat.", "The sea is deep."])
        one = await embeddings.aembed_query("The cat sat.")

    assert message.content
    assert "".join(map(str, streamed)) == message.content
    assert message.response_metadata["finish_reason"] in ("length", "stop")
    assert message.usage_metadata["total_tokens"] > 0
    assert all(each.content for each in several)
    assert [len(generations) for generations in completed.generations] == [1, 1]
    assert len(vectors) == 2
    assert one == pytest.approx(vectors[0], abs=1e-4)
