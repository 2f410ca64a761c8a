"""What runs for hours: polls, targets, tasks, signals. The only room with a clock."""
