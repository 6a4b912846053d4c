"""Steps of engines that stay on the device where they can: proposals of a draft, draws of a group."""
