"""The data plane: a SchedulerOutput becomes tensors, logits and token ids."""
