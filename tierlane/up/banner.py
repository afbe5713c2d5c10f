"""What is printed when the stack is ready: one request for each tier that works when pasted, and where to look."""

from collections.abc import Mapping

EXAMPLE_INPUT = "Once upon a time"


def banner(http_url: str, keys: Mapping[str, str], model: str, data_dir: str) -> str:
    """Return the text. It holds the demo keys, which are of this machine only."""
    parts = [f"\nTierlane is ready: {http_url}, model {model}. Try it as each of the demo customers:\n"]
    parts += [f"\n# {tier}\n{_curl(http_url, key)}\n" for tier, key in keys.items()]
    parts.append(
        f"\nHealth  curl -s -H \"Authorization: Bearer $(cat '{data_dir}/service-token')\" {http_url}/internal/health"
        f"\nState   {data_dir}/stack.json"
        "\nStop    Ctrl-C\n\n"
    )
    return "".join(parts)


def _curl(http_url: str, key: str) -> str:
    return (
        f"curl -s {http_url}/v1/inference -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{{\"input\": \"{EXAMPLE_INPUT}\"}}'"
    )
