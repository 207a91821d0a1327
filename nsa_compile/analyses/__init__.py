"""What the passes find out before they change anything: values known beforehand, rows not yet written, masks, costs."""
