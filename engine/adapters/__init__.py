"""What an adapter is: its files, its contiguous blob, where it is stored and resident."""
