"""Dependencies of the webhook routes."""

from typing import Annotated

from fastapi import Depends, Request

from app.platform import Platform
from app.webhooks.sender import Sender


async def get_sender(request: Request) -> Sender:
    """One for the whole app; it holds no connection."""
    state = request.app.state
    if not hasattr(state, "webhook_sender"):
        platform: Platform = state.platform
        state.webhook_sender = Sender(platform.settings, platform.clock)
    sender: Sender = state.webhook_sender
    return sender


SenderDep = Annotated[Sender, Depends(get_sender)]
