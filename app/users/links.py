"""The addresses that invitations and password resets lead to, in the console."""

from app.settings import Settings
from app.users.service import Invitation

PATHS = {"invitation": "/console/invitation", "password-reset": "/console/password-reset"}


def link_url(settings: Settings, invitation: Invitation) -> str:
    """The token is the path's last segment; the access log writes routes, never paths."""
    return f"{settings.public_url}{PATHS[invitation.kind]}/{invitation.token}"
