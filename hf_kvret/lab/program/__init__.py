"""What all commands of ``hf-kvret`` share: arguments, options, help, and how a run ends."""
