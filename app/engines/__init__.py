"""Engines as operators see and steer them: which there are, what each does, draining one."""
