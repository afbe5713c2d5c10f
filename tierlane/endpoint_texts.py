"""What the settings of the backend `openai:URL` mean; a section of `setting_texts`, like it free of imports that take long."""

from tierlane.setting_text import Text, number

ENDPOINT = {
    "endpoint_api_key": Text(
        "", "Key that the endpoint of openai:URL wants, as its Bearer token. Unset: none is sent."
    ),
    "endpoint_ca_file": Text(
        "", "PEM file of the authorities that may sign the endpoint's certificate. Unset: those of the system.", "FILE"
    ),
    "endpoint_cert_file": Text(
        "", "PEM file of the certificate that a worker shows to the endpoint. Unset: it shows none.", "FILE"
    ),
    "endpoint_key_file": Text(
        "", "PEM file of that certificate's key, not encrypted. Unset: it is in the certificate's file.", "FILE"
    ),
    "endpoint_connect_ms": number(
        "1000", "Milliseconds to connect to the endpoint. Shorter leaves more time for another try."
    ),
    "endpoint_first_byte_ms": number(
        "",
        "Milliseconds until the endpoint's answer begins; where nothing is streamed it begins when it is whole. Unset: "
        "what the batch has left.",
    ),
    "endpoint_total_ms": number("", "Milliseconds for a call to the endpoint. Unset: what its batch has left."),
    "endpoint_max_calls": number(
        "64", "Calls that one worker has at the endpoint at a time. More than it runs at once only wait there."
    ),
    "endpoint_max_batches": number(
        "8",
        "Batches that one worker has at the endpoint at a time, at most: it begins with one, and has more while they take "
        "no longer for it.",
    ),
}
