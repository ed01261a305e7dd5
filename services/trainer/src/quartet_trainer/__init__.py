"""The trainer service: model weights, optimizer, loss, saved states, publishing. It does not know which
algorithm asks."""
