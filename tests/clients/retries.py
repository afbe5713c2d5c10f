"""Clients with the retries that they have by default: `retries.py NAME` sends one chat, and prints the text of the answer."""

import os
import sys
from typing import Any

URL, KEY, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_KEY"], "openai"
API = f"{URL}/v1"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def openai() -> str | None:
    from openai import OpenAI

    chat = OpenAI(base_url=API, api_key=KEY).chat.completions.create(model=MODEL, messages=MESSAGES)
    return chat.choices[0].message.content


def anthropic() -> str:
    from anthropic import Anthropic

    message: Any = Anthropic(base_url=URL, api_key=KEY).messages.create(model=MODEL, messages=MESSAGES, max_tokens=9)
    return str(message.content[0].text)


def langchain() -> str:
    from langchain_openai import ChatOpenAI

    access: dict[str, Any] = {"base_url": API, "api_key": KEY, "model": MODEL}
    return ChatOpenAI(**access).invoke(MESSAGES).text


def litellm() -> str:
    from litellm import completion

    response: Any = completion(model=f"openai/{MODEL}", api_base=API, api_key=KEY, messages=MESSAGES)
    return str(response.choices[0].message.content)


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
