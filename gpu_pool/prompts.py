"""What a model reads of a request: a text as it is, a conversation in the model's template."""

from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Item
from scheduler.payload import Message, Task, decode_messages

Template = Callable[[Sequence[Message]], str]


def prompt_of(item: Item, template: Template) -> str:
    """The text for the model. Raises ValueError for a conversation that cannot be read."""
    return template(decode_messages(item.input)) if item.task is Task.CHAT else item.input


def named_turns(messages: Sequence[Message]) -> str:
    """The template of a model that has none: who says what, a turn a line, and then it is the assistant's turn."""
    return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant:"


def running_text(messages: Sequence[Message]) -> str:
    """The template of a model that only goes on from a text: all that was said, a turn a line."""
    return "\n".join(message.content for message in messages)


def last_turn(messages: Sequence[Message]) -> str:
    """The template of a model that looks at the last message alone."""
    return messages[-1].content
