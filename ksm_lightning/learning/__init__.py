"""How a network learns: schedule, rules, responses, the Learner that owns them, and training without Lightning."""
