"""What tenants ask of their limits, and how whoever runs loramux answers."""
