"""What Alertmanager is sent, and the words it shares with the rules."""
