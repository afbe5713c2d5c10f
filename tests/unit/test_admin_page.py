"""The files of the page for admins."""

import json
import re
from html import unescape

from gateway.admin_api.page import FILES, SHARED, page_document
from gateway.admin_api.roles import ROLE_ACTIONS, Action, least_role
from gateway.http.static import assets_of


def test_the_page_loads_its_files_and_those_that_it_shares() -> None:
    """Each of them, and no other."""
    named = set(re.findall(r'"/admin/assets/([^"]+)"', page_document().decode()))

    assert named == {*assets_of(FILES), *SHARED}


def test_the_page_offers_what_the_table_of_roles_allows() -> None:
    """The least role of each action, and the roles from the one with the fewest actions on. Scripts use those that the page has buttons for."""
    (content,) = re.findall('<meta name="roles" content="([^"]+)">', page_document().decode())
    scripts = "".join(FILES.joinpath(name).read_text("utf-8") for name in assets_of(FILES) if name.endswith(".js"))
    used = {action for action in Action if f'"{action}"' in scripts}

    assert json.loads(unescape(content)) == {
        "roles": list(ROLE_ACTIONS),
        "actions": {action.value: least_role(action) for action in Action},
    }
    assert used == {Action.ADMINISTER, Action.REVOKE_KEY, Action.SUSPEND_CUSTOMER, Action.CORDON}


def test_scripts_write_text_and_no_markup() -> None:
    """The name of a customer cannot become an element of the page, and no secret is stored in the browser."""
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "sessionStorage",
    )
    scripts = [name for name in assets_of(FILES) if name.endswith(".js")]

    assert len(scripts) > 5
    assert [
        (name, word) for name in scripts for word in banned if word in FILES.joinpath(name).read_text("utf-8")
    ] == []
