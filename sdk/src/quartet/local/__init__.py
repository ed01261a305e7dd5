"""Running the four services as processes of one machine: ports, generated configs, supervision."""
