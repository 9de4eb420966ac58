"""The fusion's data model: tensor values, iteration domains, and the operations that join them."""
