"""The control plane: tenant API, operator API, console, worker. It never imports torch."""
