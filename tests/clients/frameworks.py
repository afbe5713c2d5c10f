"""Frameworks for agents and evaluations in Python: `frameworks.py NAME` runs one task with a tool, and prints the result.

The stand-in calls the tool that the task names, and then reverses the tool's result.
"""

import asyncio
import os
import sys
from typing import Any

URL, KEY, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_KEY"], "openai"
API = f"{URL}/v1"
TASK = 'CALL<<weather {"city": "Rome"}>>'
SAMPLES = 3


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Its name.

    """
    return f"{city}: 21 °C"


def openai_agents() -> object:
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)
    set_default_openai_client(AsyncOpenAI(base_url=API, api_key=KEY), use_for_tracing=False)
    agent = Agent(name="assistant", model=MODEL, tools=[function_tool(weather)])

    async def streamed() -> object:
        run = Runner.run_streamed(agent, TASK)
        assert len([event async for event in run.stream_events()]) > 5
        return run.final_output

    return asyncio.run(streamed())


def pydantic_ai() -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=API, api_key=KEY))
    return Agent(model, tools=[weather]).run_sync(TASK).output


def dspy() -> object:
    import dspy

    # Samples are separate equal requests: each must have a run of its own.
    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=API, api_key=KEY, cache=False, temperature=1.0))
    question = "SAY<<[[ ## answer ## ]]\nC° 12 :emoR\n\n[[ ## completed ## ]]>>"
    found = dspy.Predict("question -> answer", n=SAMPLES)(question=question).completions.answer
    assert len(found) == SAMPLES
    return found[0]


def smolagents() -> object:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id=MODEL, api_base=API, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2)
    return agent.run('CALL<<final_answer {"answer": "C° 12 :emoR"}>>')


def llama_index() -> object:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    access: Any = {"model": MODEL, "api_base": API, "api_key": KEY}
    llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, **access)

    async def answer() -> object:
        return await FunctionAgent(tools=[weather], llm=llm).run(TASK)

    return asyncio.run(answer())


def haystack() -> object:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=API)
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(weather)])
    return agent.run(messages=[ChatMessage.from_user(TASK)])["messages"][-1].text


def inspect_ai() -> object:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import Tool, tool

    @tool(name="weather")
    def of_city() -> Tool:
        async def execute(city: str) -> str:
            """Return the weather of a city.

            Args:
                city: Its name.

            """
            return weather(city)

        return execute

    os.environ |= {"TIERLANE_BASE_URL": API, "TIERLANE_API_KEY": KEY}
    task = Task(
        dataset=[Sample(input=TASK, target="C° 12 :emoR")], solver=[use_tools(of_city()), generate()], scorer=match()
    )
    (log,) = eval(task, model=f"openai-api/tierlane/{MODEL}", display="none", log_dir=os.environ["HOME"])
    assert log.results is not None, log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1
    return log.samples[0].output.completion if log.samples else None


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
