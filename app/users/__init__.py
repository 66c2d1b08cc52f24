"""People: operators and tenants' users, their passwords, sessions and invitations."""
