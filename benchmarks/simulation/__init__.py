"""The engine's own scheduler, policy, blocks, arena and pool on a simulated clock and device."""
