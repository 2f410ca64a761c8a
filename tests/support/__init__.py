"""What tests share: bodies, scenes, recordings, servers, processes, real programs."""
