"""Layer strategies that run samples: static scales, and layers quantised one by one."""
