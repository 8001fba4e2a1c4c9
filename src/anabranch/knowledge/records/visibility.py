"""The conditions in SQL for what a caller may see."""

from typing import Any

from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import as_json

# Whether a key is not restricted to other collections: as `Caller.sees`.
SEEN = "(:collections IS NULL OR {collection} IN (SELECT CAST(value AS BIGINT) FROM json_each(:collections)))"
# Whether an owner or permissions, as columns or in JSON, permit a caller: as `Permissions.permits`.
PERMITTED = """(
    {owner} = :user OR {visibility} = 'public' OR {visibility} = 'restricted' AND (
        EXISTS (SELECT 1 FROM json_each({users}) WHERE value = :user)
        OR EXISTS (SELECT 1 FROM json_each({groups}) WHERE value IN (SELECT value FROM json_each(:groups)))
    )
)"""
OF_DOCUMENT = PERMITTED.format(
    owner="documents.owner", visibility="documents.visibility", users="allowed_users", groups="allowed_groups"
)
OF_COLLECTION = PERMITTED.format(
    owner="followed.owner",
    visibility="json_extract(followed.settings, '$.default_permissions.visibility')",
    users="followed.settings, '$.default_permissions.allowed_users'",
    groups="followed.settings, '$.default_permissions.allowed_groups'",
)
# Of the rows of `documents`, those that a caller may see: as `Catalog.permitted`, for queries that must not read what
# others have stored. Its values come from `visible_to`.
VISIBLE = f"""({SEEN.format(collection="documents.collection")} AND (
    :operator = 1 OR {OF_DOCUMENT} OR documents.visibility = 'collection' AND EXISTS (
        SELECT 1 FROM collections AS followed WHERE followed.key = documents.collection AND {OF_COLLECTION}
    )
)
)"""  # noqa: S608  our own names


def visible_to(caller: Caller) -> dict[str, Any]:
    """The values of `VISIBLE`."""
    return {
        "operator": caller.operator,
        "user": caller.user,
        "groups": as_json(caller.groups),
        "collections": collections_of(caller),
    }


def collections_of(caller: Caller) -> str | None:
    """The collections to which its key is restricted, for `SEEN`."""
    return None if caller.rights.collections is None else as_json(caller.rights.collections)
