"""What `GET /metrics` tells: counted on the way, merged over the gateways of a host, rendered when somebody asks."""
