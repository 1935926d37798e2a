"""A session over several hops: steps, recovery, routes. It knows neither torch nor the network."""
